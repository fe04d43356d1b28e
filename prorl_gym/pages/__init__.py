"""Self-contained HTML pages for people. Everything shown is escaped: it was written by models and their tools."""
