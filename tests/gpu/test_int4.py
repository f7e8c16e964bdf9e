"""What only a GPU can show of weights of 4 bits: torch's product, and torch's packing for it."""

import pytest
import torch

from tandem.tests.workers.model.test_int4_weights import SIZES, check_products, random_numbers
from tandem.workers.model.quant.int4 import pack

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_torch_packs_the_same_words(outputs: int, inputs: int) -> None:
    numbers = random_numbers(outputs, inputs).cuda()
    pairs = numbers[:, ::2] << 4 | numbers[:, 1::2]
    words = pack(numbers)
    assert torch.equal(torch._convert_weight_to_int4pack(pairs, 2 * words.shape[-1]), words)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("group", [32, 64, 128, 256])
def test_products(group: int, zeros: bool) -> None:
    check_products(group, zeros=zeros)
