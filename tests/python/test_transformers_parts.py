"""The parts of kvkeep.transformers that need no torch: what a batch can take, which layers go
together, and what a model's modules say of it."""

import random
import types

import numpy as np

from kvkeep import transformers_identity as naming
from kvkeep.transformers_plan import Layer, Plan, Span, choose, group_layers, row_spans


def test_padding_becomes_spans():
    mask = np.array([[0, 0, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0], [0, 1, 1, 0]])
    spans = row_spans(mask)
    assert spans == [Span(2), Span(0), Span(0, 2), Span(1, 3)]
    assert [span.tokens(4) for span in spans] == [2, 4, 2, 2]
    assert [span.tokens(6) for span in spans] == [4, 6, 2, 2]
    assert [span.tokens(1) for span in spans] == [0, 1, 1, 0]
    assert row_spans(np.array([[1, 0, 1]])) is None
    assert row_spans(np.array([[1, 1], [0, 0]])) is None


def test_the_last_column_is_left_and_a_cold_batch_takes_nothing():
    for may_cut in (True, False):
        rules = {"may_cut": may_cut, "may_compute": True}
        assert choose([Span(0)], [40], 41, **rules) == Plan(40, (40,), 0)
        assert choose([Span(0)] * 2, [0, 0], 9, **rules) == Plan(0, (0, 0), 0)
        assert choose([Span(5), Span(0)], [0, 0], 9, **rules) == Plan(0, (0, 0), 0)
    assert choose([Span(0)], [9], 9, may_cut=True, may_compute=True) == Plan(8, (8,), 0)
    assert choose([Span(0)], [9], 9, may_cut=False, may_compute=False) == Plan(0, (0,), 0)


def test_a_row_that_is_behind_is_computed_alone_or_holds_the_others_back():
    spans = [Span(0), Span(0)]
    assert choose(spans, [32, 16], 40, may_cut=True, may_compute=True) == Plan(32, (32, 16), 16)
    assert choose(spans, [32, 16], 40, may_cut=True, may_compute=False) == Plan(16, (16, 16), 0)
    assert choose(spans, [32, 16], 40, may_cut=False, may_compute=False) == Plan(0, (0, 0), 0)
    # A padded row needs nothing in its padding.
    assert choose([Span(0), Span(30)], [28, 0], 40, may_cut=False, may_compute=False) == \
        Plan(28, (28, 0), 0)


def test_plans_against_all_plans():
    source = random.Random(3)
    for _ in range(2000):
        length = source.randint(1, 12)
        spans, found = [], []
        for _ in range(source.randint(1, 4)):
            first = source.randrange(length)
            stop = source.choice([None, source.randint(first + 1, length)])
            spans.append(Span(first, None if stop == length else stop))
            found.append(source.randint(0, spans[-1].tokens(length)))
        may_cut, may_compute = source.random() < 0.5, source.random() < 0.5
        plan = choose(spans, found, length, may_cut=may_cut, may_compute=may_compute)
        assert 0 <= plan.columns < length
        alone = 0
        for span, count, used in zip(spans, found, plan.used, strict=True):
            assert 0 <= used <= min(count, span.tokens(plan.columns))
            assert may_cut or used in (0, count)
            alone += span.tokens(plan.columns) - used
        assert alone == plan.alone and (may_compute or alone == 0)
        cost = alone + len(spans) * (length - plan.columns)
        best = len(spans) * length
        for columns in range(length):
            wanted = [span.tokens(columns) for span in spans]
            used = [min(a, b) if may_cut or b <= a else 0
                    for a, b in zip(wanted, found, strict=True)]
            if columns and any(found) and (may_compute or used == wanted):
                best = min(best, sum(wanted) - sum(used) + len(spans) * (length - columns))
        assert best <= cost <= len(spans) * length
        if all(span == Span(0) for span in spans):
            assert cost == best, (spans, found, length, may_cut, may_compute)


def test_layers_of_equal_shape_go_together():
    full, window = Layer(2, 8, 8, "float32"), Layer(2, 8, 8, "float32", 12)
    assert group_layers([window, full, window]) == [(window, (0, 2)), (full, (1,))]
    assert group_layers([]) is None
    assert group_layers([Layer(1, size, 8, "float32") for size in range(9)]) is None


class Module:
    """As much of a torch module as is read."""

    def __init__(self, **parts):
        self._forward_hooks, self._forward_pre_hooks = {}, {}
        for name, value in parts.items():
            setattr(self, name, value)


def model(**modules):
    return types.SimpleNamespace(named_modules=lambda: modules.items())


def adapter(**changes):
    return Module(**{"lora_A": {}, "active_adapters": ["a"], "merged_adapters": [],
                     "disable_adapters": False, "scaling": {"a": 1.0, "b": 1.0}, **changes})


def test_adapters_are_read_from_the_modules():
    on = naming.switches(model(q=adapter()))
    assert on.adapters == ("a",) and on.foreign_hooks == ()
    states = {on.adapter_state}
    for other in (adapter(scaling={"a": 2.0}), adapter(active_adapters=["b"]),
                  adapter(active_adapters=["a", "b"]),
                  adapter(merged_adapters=["a"]), adapter(use_dora={"a": True})):
        states.add(naming.switches(model(q=other)).adapter_state)
    states.add(naming.switches(model(k=adapter())).adapter_state)
    assert len(states) == 7
    off = naming.switches(model(q=adapter(disable_adapters=True), k=Module()))
    assert off.adapters == () and off.adapter_state == ""


def hook():
    pass


def test_foreign_hooks_are_seen():
    hooked = Module()
    hooked._forward_hooks[1] = hook
    assert naming.switches(model(m=hooked)).foreign_hooks == ("m",)
    assert naming.switches(model(m=hooked), [id(hook)]).foreign_hooks == ()
    assert naming.switches(model(m=Module(forward=hook))).foreign_hooks == ("m",)


def test_what_is_refused():
    def config(**parts):
        made = types.SimpleNamespace(is_encoder_decoder=False, **parts)
        made.get_text_config = lambda decoder: made
        return made

    plain = naming.switches(model(m=Module()))
    assert naming.refusal(config(), plain, False) == ""
    assert "training" in naming.refusal(config(), plain, True)
    both = naming.switches(model(m=Module(is_causal=False)))
    assert "both ways" in naming.refusal(config(), both, False)
    for rope in ({"rope_type": "dynamic"}, {"full_attention": {"rope_type": "longrope"}}):
        assert "rotary" in naming.refusal(config(rope_parameters=rope), plain, False)
    assert "rotary" in naming.refusal(config(rope_scaling={"type": "dynamic"}), plain, False)
    assert naming.refusal(config(rope_parameters={"rope_type": "llama3"}), plain, False) == ""
    assert "chunked" in naming.refusal(config(layer_types=["chunked_attention"]), plain, False)


def test_a_configuration_without_what_says_nothing():
    base = {"hidden_size": 8, "_name_or_path": "a", "transformers_version": "5"}
    assert naming.config_text(base) == naming.config_text({**base, "_name_or_path": "b"})
    assert naming.config_text(base) != naming.config_text({**base, "hidden_size": 9})
