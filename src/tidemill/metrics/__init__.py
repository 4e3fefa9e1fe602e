"""Numbers in: Prometheus, scraping, windows, freshness. Numbers out: the exported series."""
