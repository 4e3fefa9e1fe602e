"""Envoy's external processing protocol: messages, the exchange of one request, and what carries them."""
