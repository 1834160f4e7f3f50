"""Parses an HTML page, without a browser."""

from html.parser import HTMLParser


class Reader(HTMLParser):
    """A page's texts, elements with their attributes, and table rows; asserts that every element is closed."""

    VOID = {"meta"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts, self.elements, self.open, self.rows = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in self.VOID and not self.get_starttag_text().endswith("/>"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data

    def of(self, tag, **attributes):
        return [found for name, found in self.elements if name == tag and attributes.items() <= found.items()]
