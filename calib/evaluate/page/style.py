"""CSS of the report, in addition to that of every page. The full colour of a map (`--full`) leaves its figures readable."""

from calib.html_page.style import BASE

STYLE = (
    BASE
    + """\
:root { --k0: #1c5cab; --k1: #e08a1e; --k2: #2f8f5b; --k3: #c2417c; --k4: #7a5bc2; --k5: #0f9aa8; --k6: #a67c1b;
  --k7: #7f7d76; --bad: #b3261e;
  --full: .62; }
@media (prefers-color-scheme: dark) {
  :root { --k0: #7db2f2; --k1: #f0b056; --k2: #6fcf97; --k3: #f08cb8; --k4: #b8a1f0; --k5: #5cd0dc; --k6: #d9b65c;
    --k7: #a3a199; --bad: #ff8a80; --full: .5; }
}
h3 { font-size: .95rem; margin: 1.2rem 0 .2rem; }
p, li { overflow-wrap: anywhere; }
summary { cursor: pointer; margin: 1rem 0 .4rem; }
.scroll:focus-visible { outline: 2px solid var(--map); }
thead th { vertical-align: bottom; }
.over { text-align: center; color: var(--ink); padding-top: .4rem; }
tbody th[scope=row] { color: var(--ink); font-weight: 400; }
thead tr > :first-child, tbody th[scope=row] { position: sticky; left: 0; background: var(--page); text-align: left; }
td.first, .over { padding-left: 1rem; }
.group th { padding-top: .9rem; text-align: left; }
.failed { color: var(--bad); }
td small { color: var(--soft); }
th button { all: unset; cursor: pointer; }
th button:focus-visible { outline: 2px solid var(--map); }
th[aria-sort=ascending] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
.scatter { display: block; width: 100%; min-width: 34rem; max-width: 54rem; height: auto; font-size: 12px; }
.scatter text { font-family: system-ui, sans-serif; fill: var(--soft); paint-order: stroke; stroke: var(--page);
  stroke-width: 3px; stroke-linejoin: round; }
.scatter .grid { stroke: var(--line); fill: none; }
.scatter .front { stroke: var(--map); fill: none; stroke-width: 1.5; stroke-opacity: .6; }
.scatter circle { fill: var(--soft); fill-opacity: .75; }
.scatter .interval { stroke: var(--soft); stroke-opacity: .3; }
.scatter .best circle { fill: var(--map); fill-opacity: 1; }
.scatter .best text { fill: var(--ink); font-weight: 600; }
.scatter .best .interval { stroke: var(--map); stroke-opacity: .6; }
.scatter .host circle { fill: var(--page); stroke: var(--soft); }
.scatter .other:hover text, .scatter .other:hover circle, .scatter .host:hover text { fill: var(--ink); }
.parts td { padding: .2rem .5rem; border: 1px solid var(--page);
  background: color-mix(in srgb, var(--map) calc(var(--share, 0%) * var(--full)), var(--page)); }
.legend span { display: inline-block; margin-right: 1rem; }
.legend i { display: inline-block; width: .8rem; height: .8rem; margin-right: .35rem; border-radius: 2px; }
.bar { display: flex; align-items: center; gap: .6rem; font-size: .82rem; line-height: 1.35; }
.bar .label { flex: 0 0 14rem; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.bar .track { flex: 1; display: flex; }
.bar i { display: block; height: .7rem; }
.bar .loss { flex: 0 0 3rem; text-align: right; font-variant-numeric: tabular-nums; }
@media (max-width: 40rem) {
  .bar .label { flex-basis: 8.5rem; }
  tbody th[scope=row] { min-width: 8.5rem; white-space: normal; overflow-wrap: anywhere; }
}
"""
    + "".join(f".kind-{place} {{ background: var(--k{place}); }}\n" for place in range(8))
    + ".kind-host { background: repeating-linear-gradient(45deg, var(--k7) 0 3px, var(--page) 3px 5px); }\n"
)
