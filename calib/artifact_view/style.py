"""How the page looks: light or dark as the reader's system is, readable on a phone."""

STYLE = """\
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
.map { display: block; width: 100%; height: auto; }
.map rect { fill: var(--map); }
.map .group { fill: none; stroke: var(--frame); stroke-width: 2; pointer-events: none; }
.map text { font-family: system-ui, sans-serif; fill: var(--ink); }
.map .axis { fill: var(--soft); }
.map .dark { fill: var(--page); }
.bars { max-width: 44rem; }
.bars .name { margin-top: .7rem; }
.bars small { color: var(--soft); }
.bar { display: flex; align-items: center; gap: .6rem; font-size: .88rem; }
.bar .label { flex: 0 0 4.2rem; color: var(--soft); }
.bar .track { flex: 1; }
.bar i { display: block; height: .7rem; border-radius: 0 2px 2px 0; background: var(--after); }
.bar .initial_loss { background: var(--before); }
.bar .loss { flex: 0 0 4rem; text-align: right; font-variant-numeric: tabular-nums; }
"""
