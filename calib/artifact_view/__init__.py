"""What a person sees of an artifact: the same tables in a terminal and on a page, the page with drawings."""
