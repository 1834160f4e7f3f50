"""CSS of all pages: light or dark like the reader's system, readable on a phone."""

BASE = """\
:root { color-scheme: light dark; --page: #fdfdfc; --ink: #1a1a19; --soft: #62615c; --line: #dcdbd6;
  --map: #1c5cab; --frame: #d1495b; --before: #b9b7af; --after: #1c5cab; }
@media (prefers-color-scheme: dark) {
  :root { --page: #171716; --ink: #f2f1ec; --soft: #a3a199; --line: #3a3935;
    --map: #7db2f2; --frame: #ff8a80; --before: #66645d; --after: #7db2f2; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 64rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .4rem; }
p { margin: .2rem 0 .8rem; color: var(--soft); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .88rem; }
th, td { padding: .2rem .9rem .2rem 0; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; }
th:first-child, td:first-child, .pairs td { text-align: left; }
.pairs td { white-space: normal; overflow-wrap: anywhere; vertical-align: top; }
.pairs td:first-child { white-space: nowrap; color: var(--soft); }
"""
