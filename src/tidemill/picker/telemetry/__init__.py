"""How the endpoints are: scraping, and what each engine calls its numbers."""
