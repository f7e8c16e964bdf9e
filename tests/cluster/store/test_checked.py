"""What a service refuses of its model before it starts."""

from pathlib import Path

import pytest

from tandem.cluster.config import load_config
from tandem.cluster.store.checked import checked_folder
from tandem.proto.errors import InvalidArgument
from tandem.tests.tiny_decoders import make_tiny_decoder


def test_a_service_on_gpus_refuses_a_model_that_keeps_states(tmp_path: Path) -> None:
    folder = make_tiny_decoder(tmp_path, "lfm2")
    fields = {"model": str(folder), "device": "cuda"}
    with pytest.raises(InvalidArgument) as raised:
        checked_folder(load_config(None, fields))
    assert raised.value.message == (
        "device: cuda: models that keep states run on cpu only; Lfm2ForCausalLM keeps states"
    )
    assert checked_folder(load_config(None, fields | {"device": "cpu"})) == folder


def test_exact_numerics_on_gpus_need_our_own_code(tmp_path: Path) -> None:
    fields = {"device": "cuda", "numerics": "exact"}
    own, other = (str(make_tiny_decoder(tmp_path / kind, kind)) for kind in ("llama", "gpt2"))
    with pytest.raises(InvalidArgument) as raised:
        checked_folder(load_config(None, fields | {"model": other}))
    assert raised.value.message == (
        "numerics: exact on cuda needs Tandem's own code; GPT2LMHeadModel runs through "
        "transformers' code, whose sums depend on the batch; use fast"
    )
    checked_folder(load_config(None, fields | {"model": own}))
    checked_folder(load_config(None, fields | {"model": other, "device": "cpu"}))
    checked_folder(load_config(None, fields | {"model": other, "numerics": "fast"}))


@pytest.mark.parametrize("kind", ["llama", "lfm2"])
def test_state_slots_without_effect_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    folder = make_tiny_decoder(tmp_path, kind)
    checked_folder(load_config(None, {"model": str(folder), "decode.state_slots": 8}))
    expected = "decode.state_slots: no effect, because this model keeps no recurrent states"
    assert caplog.messages == ([expected] if kind == "llama" else [])
