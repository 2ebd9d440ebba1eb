"""bfloat16 where the CPU has no instructions for it: the same weights, products in float32."""

import copy

import pytest
import torch
from torch import nn

from offbeat.model import devices


@pytest.fixture(params=[True, False])
def is_emulated(request, monkeypatch):
    monkeypatch.setattr(devices, "is_emulated", lambda: request.param)
    return request.param


def test_a_product_is_that_of_float32_rounded_once(is_emulated):
    layer = devices.spare(nn.Linear(64, 32).to(torch.bfloat16))
    values = torch.randn(16, 64).to(torch.bfloat16)
    exact = nn.functional.linear(values.float(), layer.weight.float(), layer.bias.float())
    assert layer(values).dtype is torch.bfloat16
    assert ("forward" in vars(layer)) == is_emulated
    if is_emulated:
        assert torch.equal(layer(values), exact.to(torch.bfloat16))
    assert torch.allclose(layer(values).float(), exact, rtol=0.02, atol=0.02)


def test_gradients_have_the_weights_dtype_and_are_right(is_emulated):
    layer = devices.spare(nn.Linear(8, 4, bias=False).to(torch.bfloat16))
    values = torch.randn(16, 8).to(torch.bfloat16).requires_grad_()
    layer(values).float().sum().backward()
    assert layer.weight.grad.dtype is values.grad.dtype is torch.bfloat16
    assert torch.allclose(layer.weight.grad.float(), values.detach().float().sum(0).expand(4, 8), rtol=0.02, atol=0.02)


def test_a_copy_computes_with_its_own_weights(is_emulated):
    layer = devices.spare(nn.Sequential(nn.Linear(8, 4).to(torch.bfloat16)))
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other[0].weight.zero_()
        other[0].bias.fill_(3.0)
    assert torch.equal(other(torch.ones(1, 8).to(torch.bfloat16)), torch.full((1, 4), 3.0, dtype=torch.bfloat16))


def test_other_dtypes_are_left_alone_before_and_after(is_emulated):
    layer = devices.spare(nn.Linear(8, 4))
    assert "forward" not in vars(layer)
    spared = devices.spare(nn.Linear(8, 4).to(torch.bfloat16)).float()
    values = torch.randn(2, 8)
    assert torch.equal(spared(values), nn.functional.linear(values, spared.weight, spared.bias))
