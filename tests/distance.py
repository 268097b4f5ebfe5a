"""How far from float64: every op, its results and gradients, beside torch's own op at the same dtype and on the same numbers.

Two roundings of the same numbers differ by chance in how far they are off. So each case is drawn from sixteen seeds, and the logarithm of
ours over torch's is averaged: larger than half a percent and four of its standard errors is no chance, but a fault. A test that allows
3e-7 on top, two units of the last place of a float32, sees nothing of an op that errs a seventh more than torch's."""
import math

import torch, torch.nn.functional as F

from xtrain.ops.cross_entropy import cross_entropy, linear_cross_entropy
from xtrain.ops.repeat_kv import repeat_kv
from xtrain.ops.rms_norm import add_rms_norm, rms_norm, rms_norm_ref
from xtrain.ops.rope import qk_norm_rope, qk_norm_rope_ref, rope, rope_ref, rope_tables
from xtrain.ops.swiglu import swiglu, swiglu_ref
from xtrain.optim import AdamW

F32, BF16, F16 = DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SEEDS, EPS = 16, 1e-6


class Draw:
    "Normal random numbers on one device"
    def __init__(self, device): self.device = torch.device(device)
    def __call__(self, *shape, dtype=F32, scale=1.): return (scale*torch.randn(*shape, device=self.device)).to(dtype)
    def ids(self, V, n): return torch.randint(V, (n,), device=self.device)
    def tables(self, T, D, dtype): return rope_tables(torch.arange(T, device=self.device), D, 1e6, dtype)


def with_grads(f, inputs, *g):
    "Results, then the gradient by each input"
    inputs = [t.detach().requires_grad_() for t in inputs]
    out = f(*inputs)
    out = out if isinstance(out, tuple) else (out,)
    return [*(t.detach() for t in out), *torch.autograd.grad(out, inputs, g)]


def three(ours, torchs, ref, inputs, *g):
    "The same of ours, of torch's, and of `ref` in float64"
    return with_grads(ours, inputs, *g), with_grads(torchs, inputs, *g), with_grads(ref, [t.double() for t in inputs], *(t.double() for t in g))


def plain_norm(x, w): return F.rms_norm(x, x.shape[-1:], w, EPS)


# Qwen3 rounds a half precision twice on the way to y, and so do we; torch's rms_norm once. There y is held against the definition, and with a gain of 1,
# where the second rounding does nothing, against torch's op.
def norm(D, rows):
    def draw(randn, dtype):
        x, w, g = randn(rows, D, dtype=dtype), randn(D, dtype=dtype), randn(rows, D, dtype=dtype)
        ours, torchs, want = three(rms_norm, plain_norm, rms_norm_ref, (x, w), g)
        if dtype != F32: torchs[0] = rms_norm_ref(x, w)
        one = torch.ones_like(w)
        return [*ours, rms_norm(x, one)], [*torchs, plain_norm(x, one)], [*want, rms_norm_ref(x.double(), one.double())]
    return 'y dx dw y1', draw


def added(D, rows):
    def draw(randn, dtype):
        x, r, w, *g = randn(rows, D, dtype=dtype), randn(rows, D, dtype=dtype), randn(D, dtype=dtype), randn(rows, D, dtype=dtype), randn(rows, D, dtype=dtype)
        def after(norm): return lambda h, w: (norm(h, w), h*1)
        h = x + r
        ours = with_grads(add_rms_norm, (x, r, w), *g)
        torchs, want = with_grads(after(plain_norm), (h, w), *g), with_grads(after(rms_norm_ref), (h.double(), w.double()), *(t.double() for t in g))
        if dtype != F32: torchs[0] = rms_norm_ref(h, w)
        return [ours[0], *ours[3:]], [torchs[0], *torchs[2:]], [want[0], *want[2:]]
    return 'y dh dw', draw


def turned(H, D, T):
    def draw(randn, dtype):
        x, g, t = randn(2, H, T, D, dtype=dtype), randn(2, H, T, D, dtype=dtype), randn.tables(T, D, dtype)
        return three(lambda x: rope(x, *t), lambda x: rope_ref(x, *t), lambda x: rope_ref(x, *(v.double() for v in t)), (x,), g)
    return 'y dx', draw


def normed_and_turned(H, D, T):
    def draw(randn, dtype):
        x, w, g, t = randn(2, T, H, D, dtype=dtype), randn(D, dtype=dtype), randn(2, H, T, D, dtype=dtype), randn.tables(T, D, dtype)
        ours, torchs, want = three(lambda x, w: qk_norm_rope(x, w, *t), lambda x, w: rope_ref(plain_norm(x, w).transpose(1, 2), *t), lambda x, w: qk_norm_rope_ref(x, w, *(v.double() for v in t)), (x, w), g)
        if dtype != F32: torchs[0] = qk_norm_rope_ref(x, w, *t)
        return ours, torchs, want
    return 'y dx dw', draw


def gated(*shape):
    def draw(randn, dtype): return three(swiglu, swiglu_ref, swiglu_ref, [randn(*shape, dtype=dtype) for _ in range(2)], randn(*shape, dtype=dtype))
    return 'y dgate dup', draw


def repeated(group):
    def draw(randn, dtype):
        copies = lambda x: x.repeat_interleave(group, 1)
        return [t[1:] for t in three(lambda x: repeat_kv(x, group), copies, copies, (randn(2, 4, 256, 64, dtype=dtype),), randn(2, 4*group, 256, 64, dtype=dtype))]
    return 'dx', draw


def scored(rows, V):
    def draw(randn, dtype):
        t = randn.ids(V, rows)
        return three(lambda z: cross_entropy(z, t, reduction='none'), *2*[lambda z: F.cross_entropy(z if z.dtype == torch.float64 else z.float(), t, reduction='none')], (randn(rows, V, dtype=dtype, scale=3),), randn(rows))
    return 'loss dz', draw


def head(rows, D, V):
    def draw(randn, dtype):
        t = randn.ids(V, rows)
        plain = lambda h, w: F.cross_entropy((h @ w).double() if h.dtype == torch.float64 else (h @ w).float(), t)
        return three(lambda h, w: linear_cross_entropy(h, w, t), plain, plain, (randn(rows, D, dtype=dtype), randn(V, D, dtype=dtype, scale=2/D**.5).t()), torch.ones((), device=randn.device))
    return 'loss dh dw', draw


def stepped(n):
    def draw(randn, dtype):
        start, gs = randn(n, dtype=dtype), [randn(n, dtype=dtype) for _ in range(5)]
        def run(make, dtype=dtype):
            p = torch.nn.Parameter(start.to(dtype, copy=True))
            opt = make([p], lr=1e-2, weight_decay=.1, eps=1e-4)               # 1e-8 is 0 in float16, torch's moments then give 0/0
            for g in gs:
                p.grad = g.to(dtype)
                opt.step()
            return p.detach()
        opt = AdamW([p := torch.nn.Parameter(start.clone())], max_norm=1.)
        p.grad = gs[0].clone()
        opt.step()
        return [run(AdamW), opt.norm], [run(torch.optim.AdamW), torch.nn.utils.get_total_norm([gs[0]])], [run(torch.optim.AdamW, torch.float64), gs[0].double().norm()]
    return 'weights norm', draw


def compare(names, draw, dtype, device):
    "Of each result and gradient: its name, our error, torch's, the logarithm of their ratio, the standard error of that"
    seen = []
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        ours, torchs, want = draw(Draw(device), dtype)
        seen.append(torch.stack([torch.stack([(t.double()-w).norm()/w.norm() for t, w in zip(ts, want)]) for ts in (ours, torchs)]))
    a, b = torch.stack(seen).clamp_min(1e-30).unbind(1)
    log = (a/b).log()
    return list(zip(names.split(), a.mean(0).tolist(), b.mean(0).tolist(), log.mean(0).tolist(), (log.std(0)/SEEDS**.5).tolist()))


def too_far(log, error, slack=.005): return log > math.log1p(slack) + 4*error


def further(rows, slack=.005): return [f'{n}: ours {a:.3e}, torch {b:.3e}, {math.expm1(log):+.1%} ± {e:.1%}' for n, a, b, log, e in rows if too_far(log, e, slack)]
