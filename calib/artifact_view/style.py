"""The CSS of an artifact's page."""

from calib.html_page.style import BASE

STYLE = (
    BASE
    + """\
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
)
