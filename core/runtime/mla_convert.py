"""Latent attention (MLA) out of a checkpoint with KV heads: keys and values factored into one latent, without training.

For one token, x is the normed input of attention, extended by a 1 that carries biases. A pair of rotary dimensions is
one complex number; pair p of the keys of all KV heads is kappa_p = K_p x in C^g. Rotation multiplies the whole of
kappa_p by one phase, so it commutes with any matrix over the heads:

1. Per pair, a change of basis u = F_p kappa_p (kappa_p = B_p u) orders what the heads have in common by how much it
   adds to the scores: the eigenvectors of the keys' second moment weighted by the queries' energy per head.
2. The components that lose most without rotation, `qk_rope_head_dim` real dimensions in all, become the shared rotary
   key; queries are multiplied by B to match. The choice is one for all layers, as frequencies are the model's.
3. Other components are kept without rotation: e^(i distance theta) is replaced by its mean c_p over distances, which
   is close to 1 for the slow pairs.
4. These rest keys and the values are one matrix, rows weighted by what an error costs (of keys: second moment of the
   queries; of values: the output projection; both in units of the attention output), columns by the centred
   covariance of x. Its best approximation of rank `kv_lora_rank` is the latent (Eckart-Young).
5. Values are then fitted again to this latent, by least squares over what attention makes of them: errors of single
   tokens that average out may be large, those of what all heads read may not.
6. The mean of x costs nothing: a constant in keys shifts all scores of a query alike, a constant in values comes
   through attention unchanged and goes, head by head, into the bias of o_proj.

With all key dimensions in the rotary part and as many latent dimensions as values have, nothing is lost.
Related: Multi-head latent attention (arXiv:2405.04434), TransMLA (arXiv:2502.07864), MHA2MLA (arXiv:2502.14837).

Invariants
* Everything is float64 until the new tensors are handed out.
* One layer is factored at a time; the results are kept, since four tensors come from each.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from twinfer.core.errors import ModelError
from twinfer.core.runtime.calibration import Inputs
from twinfer.core.runtime.convert import Converted, ReplacedTensors
from twinfer.core.runtime.rope import DynamicRotary, rotary_of
from twinfer.core.runtime.weights import Loader, WeightSource
from twinfer.core.spec import MLASpec, ModelSpec

MAX_DISTANCE = 512  # tokens; how far attention is taken to look, with weight 1 / (1 + distance)
KEY_WEIGHT = 0.25  # of errors of keys against those of values; measured, see docs/attention-variants.md
RIDGE = 1e-9  # of the mean diagonal: keeps moments invertible
_PARTS = ("q_proj.weight", "q_proj.bias", "kv_a_proj_with_mqa.weight", "kv_a_proj_with_mqa.bias", "kv_b_proj.weight",
          "o_proj.bias")  # fmt: skip


def to_latent(source: WeightSource, spec: ModelSpec, model: ModelSpec, inputs: Sequence[Inputs]) -> Converted:
    """`source` of a model `spec` with KV heads as one of latents `model` (its `mla` says how wide).

    inputs: of each layer's attention (`calibration.py`); they only matter where something is lost.
    """
    assert model.mla is not None
    frequencies = _frequencies(source, spec)
    layers = [Layer.read(source, spec, i, frequencies, seen) for i, seen in enumerate(inputs)]
    kept = choose(layers, model.mla.qk_rope_head_dim)
    mla = replace(
        model.mla, rope_frequencies=tuple(float(frequencies[p]) for p, n in enumerate(kept) for _ in range(n))
    )
    made: dict[str, Tensor] = {}
    for i, layer in enumerate(layers):
        made |= {f"model.layers.{i}.self_attn.{part}": t for part, t in layer.factored(kept, mla).items()}
    gone = [name for name in source.names() if re.search(r"\.self_attn\.[kv]_proj\.(weight|bias)$", name)]
    shapes = {name: tuple(tensor.shape) for name, tensor in made.items()}
    return Converted(ReplacedTensors(source, shapes, made.__getitem__, gone), replace(model, mla=mla))


def _frequencies(source: WeightSource, spec: ModelSpec) -> Tensor:
    """Angle per position of each pair, `[pairs]`."""
    rotary = rotary_of(spec, Loader(source, torch.float32, "cpu"))
    if isinstance(rotary, DynamicRotary) or rotary.scale != 1.0:
        raise ModelError(f"{spec.name}: rotary positions that change with the length cannot be converted to latents")
    return rotary.inv_freq.double()


def choose(layers: Sequence[Layer], rope_dim: int) -> list[int]:
    """How many components of each pair keep their rotation, `rope_dim / 2` in all: those whose loss costs most."""
    cost = sum(layer.unrotated_cost for layer in layers)
    assert isinstance(cost, Tensor)
    order = cost.flatten().argsort(descending=True, stable=True)[: rope_dim // 2]
    return torch.bincount(order // cost.shape[1], minlength=cost.shape[0]).tolist()


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's projections and what its inputs say of them.

    q [heads, d, hidden + 1], k, v [kv_heads, d, hidden + 1] (bias last), o [heads, hidden, d].
    covariance of inputs and of attended inputs [hidden + 1, hidden + 1]; head_means of the latter [heads, hidden + 1].
    queries [kv_heads, d, d]: second moment of the queries of each KV head, weighted by what their scores move.
    energy [pairs, kv_heads]: of each component, to_basis and from_basis [pairs, kv_heads, kv_heads] (complex).
    phase [pairs] (complex): mean of the rotation over distances.
    """

    spec: ModelSpec
    pairs: int
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    out_bias: Tensor | None
    head_means: Tensor
    covariance: Tensor
    attended: Tensor
    queries: Tensor
    outputs: Tensor
    total: float
    energy: Tensor
    to_basis: Tensor
    from_basis: Tensor
    phase: Tensor

    @classmethod
    def read(cls, source: WeightSource, spec: ModelSpec, i: int, frequencies: Tensor, inputs: Inputs) -> Layer:
        names = frozenset(source.names())
        prefix, dim, group = f"model.layers.{i}.self_attn.", spec.head_dim, spec.num_heads // spec.num_kv_heads

        def projection(name: str, heads: int) -> Tensor:
            weight = source.get(f"{prefix}{name}.weight").double()
            bias = f"{prefix}{name}.bias"
            column = source.get(bias).double() if bias in names else weight.new_zeros(len(weight))
            return torch.cat((weight, column[:, None]), dim=1).view(heads, -1, weight.shape[1] + 1)

        q = projection("q_proj", spec.num_heads)
        k, v = (projection(name, spec.num_kv_heads) for name in ("k_proj", "v_proj"))
        o = source.get(f"{prefix}o_proj.weight").double().view(-1, spec.num_heads, spec.v_dim).transpose(0, 1)
        mean = torch.cat((inputs.tokens.mean, torch.ones(1, dtype=torch.float64)))
        covariance, attended = (
            torch.nn.functional.pad(c, (0, 1, 0, 1)) for c in (inputs.tokens.covariance, inputs.attended_covariance)
        )
        moment = covariance + mean[:, None] * mean
        # a score that is off by s moves the output of its head by about s times the spread of its values
        spread = [_trace(o[h] @ v[h // group], covariance) for h in range(spec.num_heads)]
        queries = torch.stack(
            [sum(spread[h] * (q[h] @ moment @ q[h].t()) for h in range(n * group, (n + 1) * group)) / dim
             for n in range(spec.num_kv_heads)]
        )  # fmt: skip
        outputs = torch.stack(
            [sum(o[h].t() @ o[h] for h in range(n * group, (n + 1) * group)) for n in range(spec.num_kv_heads)]
        )
        pairs = len(frequencies)
        diagonal = torch.diagonal(queries, dim1=1, dim2=2)
        weight = ((diagonal[:, :pairs] + diagonal[:, pairs : 2 * pairs]) / 2).t()  # [pairs, kv_heads]
        weight = weight.clamp_min(RIDGE * float(weight.mean()) + 1e-300).sqrt().to(torch.complex128)
        turned = _complex(k, pairs).transpose(0, 1)  # [pairs, kv_heads, hidden + 1]
        keys = turned @ moment.to(torch.complex128) @ turned.mH
        energy, vectors = torch.linalg.eigh(weight[:, :, None] * keys * weight[:, None, :])
        energy, vectors = energy.flip(-1).clamp_min(0.0), vectors.flip(-1)
        return cls(
            spec=spec, pairs=pairs, q=q, k=k, v=v, o=o,
            out_bias=source.get(f"{prefix}o_proj.bias").double() if f"{prefix}o_proj.bias" in names else None,
            head_means=torch.nn.functional.pad(inputs.head_means, (0, 1), value=1.0), covariance=covariance, attended=attended, queries=queries, outputs=outputs, total=sum(spread), energy=energy,
            to_basis=vectors.mH * weight[:, None, :], from_basis=vectors / weight[:, :, None],
            phase=_mean_phase(frequencies),
        )  # fmt: skip

    @property
    def unrotated_cost(self) -> Tensor:
        """`[pairs, kv_heads]`: error of the attention output when a component is not turned, in parts of its spread."""
        return self.energy * (1 - self.phase.abs() ** 2)[:, None] / self.total

    def factored(self, kept: Sequence[int], mla: MLASpec) -> dict[str, Tensor]:
        """The new tensors by their names in the block, float32; see the head of this file for the steps."""
        rope_key, rope_query = self._rotary(kept)
        rest = self._rest(kept)
        spec, rank, kv_heads = self.spec, mla.kv_lora_rank, self.spec.num_kv_heads
        group, width = spec.num_heads // kv_heads, spec.head_dim
        key_root, value_root = _root(KEY_WEIGHT * self.queries), _root(self.outputs)
        rows = torch.cat(((key_root @ rest).flatten(0, 1), (value_root @ self.v).flatten(0, 1)))
        _, vectors = torch.linalg.eigh(rows @ self.covariance @ rows.t())
        basis = vectors.flip(1)[:, :rank]
        down = basis.t() @ rows
        down[:, -1] = 0.0  # a constant latent would be a constant key and a constant value: see below
        up_key = torch.linalg.solve(key_root, basis[: kv_heads * width].view(kv_heads, width, rank))
        up_value = torch.linalg.solve(value_root, basis[kv_heads * width :].view(kv_heads, spec.v_dim, rank))
        up_value = up_value + _fit((self.v - up_value @ down), down, self.attended)
        lost = self.v - up_value @ down  # its mean comes through attention as it is
        bias = sum(self.o[h] @ (lost[h // group] @ self.head_means[h]) for h in range(spec.num_heads))
        bias = bias if self.out_bias is None else bias + self.out_bias
        nope = mla.qk_nope_head_dim
        query = torch.cat((self.q[:, :nope], rope_query), dim=1).flatten(0, 1)
        kv_a = torch.cat((down, rope_key))
        up = torch.cat((up_key[:, :nope], up_value), dim=1).repeat_interleave(group, dim=0).flatten(0, 1)
        found = {
            "q_proj.weight": query[:, :-1], "q_proj.bias": query[:, -1], "kv_a_proj_with_mqa.weight": kv_a[:, :-1],
            "kv_a_proj_with_mqa.bias": kv_a[:, -1], "kv_b_proj.weight": up, "o_proj.bias": bias,
        }  # fmt: skip
        zero_biases = [name for name, t in found.items() if name.endswith("bias") and not t.any()]
        return {name: t.float().contiguous() for name, t in found.items() if name not in zero_biases}

    def _rotary(self, kept: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Shared rotary key `[rope_dim, hidden + 1]` and its queries `[heads, rope_dim, hidden + 1]`, in halves."""
        group = self.spec.num_heads // self.spec.num_kv_heads
        keys, queries = _complex(self.k, self.pairs), _complex(self.q, self.pairs)
        owner = torch.arange(self.spec.num_heads) // group
        key, query = [], []
        for p, count in enumerate(kept):
            for j in range(count):
                key.append(self.to_basis[p, j] @ keys[:, p])
                query.append(self.from_basis[p, owner, j].conj()[:, None] * queries[:, p])
        if not key:
            return self.k.new_zeros(0, self.k.shape[2]), self.q.new_zeros(self.q.shape[0], 0, self.q.shape[2])
        k, q = torch.stack(key), torch.stack(query, dim=1)
        return torch.cat((k.real, k.imag)), torch.cat((q.real, q.imag), dim=1)

    def _rest(self, kept: Sequence[int]) -> Tensor:
        """Keys without the rotary components, not turned: `[kv_heads, d, hidden + 1]`."""
        rest, keys, pairs = self.k.clone(), _complex(self.k, self.pairs), self.pairs
        for p, count in enumerate(kept):
            left = self.from_basis[p][:, count:] @ (self.to_basis[p][count:] @ keys[:, p])
            left = self.phase[p].conj() * left
            rest[:, p], rest[:, p + pairs] = left.real, left.imag
        return rest


def _complex(heads: Tensor, pairs: int) -> Tensor:
    """Rotary pairs `[heads, pairs, n]` of `heads [heads, d, n]`, which turn (i, i + pairs) together."""
    return torch.complex(heads[:, :pairs].contiguous(), heads[:, pairs : 2 * pairs].contiguous())


def _mean_phase(frequencies: Tensor) -> Tensor:
    """Mean of e^(i distance frequency) over the distances attention looks back, `[pairs]`."""
    distance = torch.arange(MAX_DISTANCE, dtype=torch.float64)
    weight = 1 / (1 + distance)
    angles = distance * frequencies[:, None]
    return torch.complex(angles.cos(), angles.sin()) @ (weight / weight.sum()).to(torch.complex128)


def _root(moments: Tensor) -> Tensor:
    """Symmetric square roots of `moments [n, d, d]`, made invertible."""
    values, vectors = torch.linalg.eigh(moments)
    floor = RIDGE * values.mean(-1, keepdim=True) + 1e-300
    return (vectors * values.clamp_min(0).add(floor).sqrt()[:, None, :]) @ vectors.mT


def _fit(target: Tensor, latent: Tensor, moment: Tensor) -> Tensor:
    """`up` for which `up @ latent` is nearest to `target [n, d, hidden]`, for inputs of second moment `moment`."""
    gram = latent @ moment @ latent.t()
    gram = gram + RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    return torch.linalg.solve(gram, latent @ moment @ target.mT).mT


def _trace(a: Tensor, moment: Tensor) -> float:
    """E|a x|^2 for inputs of second moment `moment`."""
    return float(((a @ moment) * a).sum())


__all__ = ["Layer", "choose", "to_latent"]
