"""The targets for the reference GPU, one H200, as rows of data, and the list of measurements.

A figure is a ratio or a share measured in one process; `figure` is its name in the measurement's result. `accept` is the required
limit, `stretch` the desired one, `ideal` the limit given by the bytes alone.
"""

from dataclasses import dataclass

from benchmarks.gpu import (
    attend_alone,
    batch,
    decode_attention,
    dictionary_step,
    encoding,
    generation,
    launch_options,
    prefill,
    pursuit,
    saliency,
    specache,
    step_lengths,
    step_profile,
)
from benchmarks.gpu.bench import Measurement

# In the order in which they run, so that a run that is cut short has the most important rows: first what the kernels are for, then
# what no GPU has measured yet, last what has no target.
MEASUREMENTS = (
    Measurement("decode attention", decode_attention.tiers, 30),
    Measurement("uniform 4 bit", decode_attention.uniform_4_bit, 20),
    Measurement("uniform 2 bit", decode_attention.uniform_2_bit, 20),
    Measurement("decode attention, MHA", decode_attention.tiers_one_row, 25),
    Measurement("tokens/s", generation.against_dynamic, 30),
    Measurement("GEAR", decode_attention.gear, 25),
    Measurement("prefill, ZipCache", prefill.zipcache, 20),
    Measurement("prefill, KIVI", prefill.kivi, 20),
    Measurement("prefill, MiKV", prefill.mikv, 20),
    Measurement("quantise and pack", encoding.quantise, 10),
    Measurement("probe saliency", saliency.probes, 15),
    Measurement("largest batch", batch.largest, 30),
    Measurement("SpeCache step", specache.fetching, 30),
    Measurement("matching pursuit", pursuit.pursuit, 20),
    Measurement("NeuralDict step", dictionary_step.training_step, 20),
    Measurement("tokens/s, quanto", generation.against_quanto, 30),
    Measurement("attention kernel alone", attend_alone.alone, 25),  # no target; shows what the rest of a step adds
    Measurement("transform coding", decode_attention.components, 60),  # no target
)

# Run only if named with --only: they analyse where time is spent, and take longer than a full run has left.
ON_REQUEST = (
    Measurement("step profile", step_profile.step_profile, 120),
    Measurement("launch options, batch 1", launch_options.batch_1, 180),
    Measurement("launch options, batch 8", launch_options.batch_8, 180),
    Measurement("launch options, steps", launch_options.of_steps, 180),
    Measurement("step, by tokens", step_lengths.by_tokens, 90),
)


@dataclass(frozen=True)
class Target:
    """A row of the table: a ratio ("x") or a share ("%"); `more`: whether larger values are better."""

    name: str
    measurement: str
    figure: str
    accept: float
    stretch: float
    ideal: float | None = None
    unit: str = "x"
    more: bool = True

    def reached(self, value: float) -> str:
        """Returns the best limit that `value` reaches: "stretch" or "accept"; else "missed"."""
        for name, limit in (("stretch", self.stretch), ("accept", self.accept)):
            if value >= limit if self.more else value <= limit:
                return name
        return "missed"

    def shown(self, value: float | None) -> str:
        """Returns a number of this row as text; empty for None."""
        if value is None:
            return ""
        return f"{100 * value:.3g} %" if self.unit == "%" else f"{value:.2f}{self.unit}"


def less(
    name: str, measurement: str, figure: str, accept: float, stretch: float, ideal: float | None, unit: str
) -> Target:
    """Returns a row for which smaller values are better."""
    return Target(name, measurement, figure, accept, stretch, ideal, unit, more=False)


TARGETS = (
    Target("decode attention, 60/40 of 4/2 bits : SDPA", "decode attention", "speedup", 3.0, 4.0, 4.9),
    Target("the same, MHA 32k x 1", "decode attention, MHA", "speedup", 3.0, 4.0, 4.9),
    Target("uniform 4 bit, g = 128 : SDPA", "uniform 4 bit", "speedup", 2.8, 3.3, 3.8),
    Target("uniform 2 bit, g = 128 : SDPA", "uniform 2 bit", "speedup", 3.8, 5.0, 7.1),
    Target("share of the copy rate, 4 bit", "uniform 4 bit", "share of copy", 0.70, 0.80, None, "%"),
    Target("share of the copy rate, 2 bit", "uniform 2 bit", "share of copy", 0.50, 0.65, None, "%"),
    Target("GEAR : SDPA", "GEAR", "speedup", 1.8, 2.4, 3.05),
    Target("GEAR : materialise and SDPA", "GEAR", "against materialise", 6.0, 10.0),
    less("quantise and pack, one pass : clone()", "quantise and pack", "one pass", 0.9, 0.7, 0.6, "x"),
    less("quantise and pack, two passes : clone()", "quantise and pack", "two passes", 1.4, 1.1, None, "x"),
    less("probe saliency : flash forward, 32k", "probe saliency", "share of flash", 0.15, 0.10, 0.075, "%"),
    less("prefill overhead, ZipCache, 32k", "prefill, ZipCache", "overhead", 0.06, 0.04, None, "%"),
    less("prefill overhead, MiKV, 32k", "prefill, MiKV", "overhead", 0.06, 0.04, None, "%"),
    less("prefill overhead, KIVI, 32k", "prefill, KIVI", "overhead", 0.06, 0.04, None, "%"),
    Target("matching pursuit : float32 torch", "matching pursuit", "float32", 10.0, 15.0),
    Target("matching pursuit : bfloat16 torch", "matching pursuit", "bfloat16", 2.5, 4.0),
    Target("NeuralDict step : autograd, N = 8192", "NeuralDict step", "speedup", 8.0, 12.0),
    less("SpeCache step with : without fetch, k = 64", "SpeCache step", "with fetch", 1.15, 1.05, None, "x"),
    Target("tokens/s : QuantizedCache (quanto, 4 bit)", "tokens/s, quanto", "speedup", 4.0, 8.0),
    Target("tokens/s : DynamicCache, eager", "tokens/s", "eager", 1.3, 1.8),
    Target("tokens/s : DynamicCache, graph", "tokens/s", "graph", 2.0, 3.0),
    Target("largest batch at 32k : 16 bits", "largest batch", "batch", 4.0, 4.5),
    less("measured : predicted bytes, apart", "largest batch", "bytes", 0.02, 0.005, None, "%"),
)
