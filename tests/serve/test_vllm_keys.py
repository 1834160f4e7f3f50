"""Names under which a request's chunks are stored: whatever their keys and values depend on changes the name of its chunk and of
all later ones."""

from types import SimpleNamespace

import pytest
from vllm_calls import Request

from calib.serve.vllm.keys import Keys

CHUNK, IDS = 4, list(range(100, 115))


def keys(ids=IDS, model="model", chunk=CHUNK, **fields):
    found = Keys(Request("any", list(ids), **fields), model, chunk)
    return [found[index] for index in range(found.whole)]


def picture(name, offset, length=2):
    return SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=offset, length=length))


def test_a_common_beginning_has_common_keys():
    assert len(set(keys())) == 3 and keys() == keys([*IDS, 1, 2])[:3] == keys(IDS[:12])
    assert keys(IDS[:3]) == []


@pytest.mark.parametrize(
    ("change", "alike"),
    [
        ({"model": "another"}, 0),
        ({"ids": [0, *IDS[1:]]}, 0),
        ({"ids": [*IDS[:7], 0, *IDS[8:]]}, 1),
        ({"ids": [*IDS[4:8], *IDS[:4], *IDS[8:]]}, 0),
        ({"cache_salt": "mine"}, 0),
        ({"lora_request": SimpleNamespace(lora_name="a", lora_path="/a")}, 0),
        ({"mm_features": [picture("p", 6)]}, 1),
        ({"mm_features": [picture("p", 7, 2)]}, 1),
        ({"mm_features": [picture("p", 12)]}, 3),
    ],
)
def test_what_else_a_text_depends_on(change, alike):
    plain, changed = keys(), keys(**change)
    assert [one == other for one, other in zip(plain, changed, strict=True)] == [at < alike for at in range(3)]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"mm_features": [picture("p", 5)]}, {"mm_features": [picture("q", 5)]}),
        ({"mm_features": [picture("p", 5)]}, {"mm_features": [picture("p", 6)]}),
        ({"mm_features": [picture("p", 0, 12)]}, {"mm_features": [picture("q", 0, 12)]}),
        (
            {"lora_request": SimpleNamespace(lora_name="a", lora_path="/a")},
            {"lora_request": SimpleNamespace(lora_name="a", lora_path="/b")},
        ),
        ({"cache_salt": "a"}, {"cache_salt": "b"}),
        ({"cache_salt": "a"}, {"model": "modela"}),
    ],
)
def test_two_of_a_kind_differ(one, other):
    assert keys(**one)[1:] != keys(**other)[1:] and not {*keys(**one)[1:]} & {*keys(**other)[1:]}


def test_tokens_that_come_later_are_seen_and_embeddings_have_no_keys():
    request = Request("any", IDS[:5])
    found = Keys(request, "model", CHUNK)
    assert found.whole == 1
    request.all_token_ids += IDS[5:]
    assert [found[index] for index in range(found.whole)] == keys()
    assert keys(prompt_embeds=object()) == []
    embedded = Keys(request := Request("any", IDS, prompt_embeds=object()), "model", CHUNK)
    request.prompt_embeds = None  # an engine may drop them once they are computed
    assert embedded.whole == 0
