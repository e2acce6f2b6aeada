"""One runnable module a claim; each prints a table and, last, one flat JSON line."""
