"""torch.compile around a compressed cache: the model is compiled, attention over what the cache holds is not traced."""

import pytest
import torch
from toy_models import generate, left_padded, random_model

from calib.runtime import attention, compress
from calib.runtime.untraced import REASON


@pytest.fixture
def graphs():
    """The graphs that torch.compile makes, which the test appends."""
    torch._dynamo.reset()
    yield []
    torch._dynamo.reset()


@pytest.mark.full
@pytest.mark.parametrize(
    ("method", "options"), [("kivi", {"residual": 32}), ("specache", {"k": 16, "residual": 32})], ids=str
)
def test_the_model_is_compiled_around_the_cache(method, options, graphs):
    def keep(graph, _):
        graphs.append(graph)
        return graph.forward

    inputs, model = left_padded([40, 31]), random_model("llama", num_hidden_layers=1)
    with compress(model, method, **options) as cache:
        expected = generate(model, inputs, cache, max_new_tokens=3).sequences
    model.forward = torch.compile(model.forward, backend=keep)
    with compress(model, method, **options) as cache:
        assert torch.equal(generate(model, inputs, cache, max_new_tokens=3).sequences, expected)
    traced = [node for graph in graphs for node in graph.graph.nodes if attention.__file__ in (node.stack_trace or "")]
    assert graphs and not traced


def test_a_wrapped_model_is_refused_with_both_remedies(graphs):
    wrapped = torch.compile(random_model("llama", num_hidden_layers=1), backend="eager")
    with pytest.raises(
        ValueError, match=r"got OptimizedModule; pass model\._orig_mod, or compile in place: model\.comp"
    ):
        compress(wrapped, "kivi")


@pytest.mark.full
def test_both_remedies_work(graphs):
    inputs, model = left_padded([40, 31]), random_model("llama", num_hidden_layers=1)
    wrapped = torch.compile(model, backend="eager")
    with compress(wrapped._orig_mod, "kivi", residual=32) as cache:
        expected = generate(model, inputs, cache, max_new_tokens=3).sequences
    with compress(wrapped._orig_mod, "kivi", residual=32) as cache:
        assert torch.equal(generate(wrapped, inputs, cache, max_new_tokens=3).sequences, expected)
    model.compile(backend="eager")
    with compress(model, "kivi", residual=32) as cache:
        assert torch.equal(generate(model, inputs, cache, max_new_tokens=3).sequences, expected)


def test_a_whole_graph_is_refused_with_the_reason(graphs):
    model = random_model("llama", num_hidden_layers=1)
    compiled = torch.compile(model.forward, backend="eager", fullgraph=True)
    with compress(model, "kivi") as cache, pytest.raises(torch._dynamo.exc.Unsupported, match=REASON):
        compiled(torch.ones(1, 5, dtype=torch.long), past_key_values=cache)
