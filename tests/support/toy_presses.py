"""Toy presses with the interface of kvpress, and the cases on which tests run them."""

from contextlib import contextmanager
from types import SimpleNamespace

from toy_evaluation import subject

from benchmarks.peers.presses import build
from calib.evaluate.tasks import build_task
from calib.runtime.cache_argument import cache_in

SINKS = 4


class BasePress:
    """Keeps a prompt's first and last tokens; each layer keeps `slope` more than the layer before."""

    def __init__(self, compression_ratio: float = 0.0, slope: int = 0, label: str = "last"):
        if not 0 <= compression_ratio < 1:
            raise AssertionError("Compression ratio must be between 0 and 1")
        self.compression_ratio, self.slope, self.label = compression_ratio, slope, label

    def kept(self, length, layer):
        return kept(length, self.compression_ratio, layer * self.slope)

    @contextmanager
    def __call__(self, model):
        def cut(module, args, given, output):
            for number, layer in enumerate(cache_in(given).layers):
                chosen = self.kept(layer.keys.shape[2], number)
                layer.keys, layer.values = layer.keys[:, :, chosen].clone(), layer.values[:, :, chosen].clone()

        hook = model.register_forward_hook(cut, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()


class Wrapper(BasePress):
    def __init__(self, press, share: float = 0.25):
        self.press, self.share = press, share

    def kept(self, length, layer):
        return self.press.kept(length, layer)


class Broken(BasePress):
    def kept(self, length, layer):
        raise AssertionError("Input should contain\n more tokens")


class DecodingPress(BasePress):
    pass


class Switched(BasePress):
    def __init__(self, decoding: bool = False):
        self.decoding = decoding


LIBRARY = SimpleNamespace(
    BasePress=BasePress,
    KnormPress=BasePress,
    OtherPress=BasePress,
    BrokenPress=Broken,
    AdaKVPress=Wrapper,
    KeyRerotationPress=Wrapper,
    DecodingPress=DecodingPress,
    PrefillDecodingPress=DecodingPress,
    DMSPress=Switched,
    patched=print,
)


def kept(length, ratio, more=0):
    last = max(1, int(length * (1 - ratio)) - SINKS + more)
    return [*range(SINKS), *range(length - last, length)]


def press(name="none", ratio=None, **options):
    return build(name, ratio, options, LIBRARY)


def columns(model, **options):
    """Columns of two tasks: questions of unequal lengths with several answers each, and texts whose last chunk is shorter."""
    given = subject(model, batch_size=4)
    lines = build_task("retrieval", {"lines": [3], "cases": 6, "queries": 2})
    text = build_task("perplexity", {"prefill": 30, "chunk": 7, "length": 64, "tokens": 6 * 34})
    return [*lines.columns(given), *text.columns(given)]


def written(column):
    return {"title": column.title, "settings": column.settings, **column.cases()}
