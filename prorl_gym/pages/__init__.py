"""Self-contained HTML pages: each is one file, without a build step or external resources.

Their content was written by models and their tools. It is embedded as JSON that cannot end its element, the page's own
script inserts it as text and never as markup, and a Content-Security-Policy with script hashes keeps every other
script from running.
"""
