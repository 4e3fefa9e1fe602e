"""Commands. Nothing imports this package."""
