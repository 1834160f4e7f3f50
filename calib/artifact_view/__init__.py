"""Views of an artifact: tables in a terminal, and the same tables with drawings on an HTML page."""
