"""Who is there: pools, their pods, and the endpoints that follow from both."""
