"""The endpoint picker: which replica serves this request."""
