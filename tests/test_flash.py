"Flash attention on a CPU: tiles against the composed reference, gradients, masks of every kind, faults (A09, A10, A12, A16)"
import random

import pytest, torch
from hypothesis import HealthCheck, given, settings, strategies as st

from xtrain.config import ModelConfig
from xtrain.gradcheck import rel_error
from xtrain.model import TinyTransformer
from xtrain.ops.attention import attention, attention_ref, causal_mask
from xtrain.ops.flash_attention import FlashTiles, flash_attention, flash_backward, flash_forward, key_runs, schedule, visible

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
quick = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


def qkv(B, H, K, T, S, D, dtype=F64):
    "As projections leave them: `(B, T, H, D)` in memory"
    return [torch.randn(B, t, h, D).to(dtype).transpose(1, 2).detach().requires_grad_() for h, t in ((H, T), (K, S), (K, S))]


def all_of(f, q, k, v, g):
    o = f(q, k, v)
    return o, *torch.autograd.grad(o, (q, k, v), g)


@quick
@given(B=st.integers(1, 2), K=st.integers(1, 3), group=st.integers(1, 4), T=st.integers(0, 40), S=st.integers(0, 40), D=st.sampled_from([1, 5, 16, 63]),
    tile=st.tuples(st.integers(1, 50), st.integers(1, 50)), causal=st.booleans(), padded=st.booleans(), seed=st.integers(0, 99))
def test_tiles_equal_composed(B, K, group, T, S, D, tile, causal, padded, seed):
    torch.manual_seed(seed)
    q, k, v = qkv(B, K*group, K, T, S, D); g = torch.randn(B, K*group, T, D).double()
    runs = key_runs(T, S, causal, torch.randint(0, S+1, (B,)) if padded else None)
    mask = visible(runs, torch.arange(S))[:, None]
    ref = all_of(lambda *x: attention_ref(*x, mask), q, k, v, g) if S else (torch.zeros_like(q), *(torch.zeros_like(t) for t in (q, k, v)))
    with torch.no_grad():
        o, L = flash_forward(q, k, v, runs, D**-.5, tile)
        got = o, *flash_backward(g, q, k, v, o, L, runs, D**-.5, tile=tile)
    for a, b in zip(got, ref): assert a.shape == b.shape and torch.allclose(a, b, atol=1e-12, rtol=1e-12)


@quick
@given(lengths=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=5), same=st.booleans(), causal=st.booleans(), extra=st.integers(0, 5), seed=st.integers(0, 99))
def test_packed_equals_apart(lengths, same, causal, extra, seed):
    torch.manual_seed(seed)
    if same: lengths = [(a, a) for a, _ in lengths]
    tq, tk = (torch.tensor([0, *x]).cumsum(0) for x in zip(*lengths))
    q, k, v = qkv(2, 4, 2, int(tq[-1])+extra, int(tk[-1])+extra, 8); g = torch.randn_like(q)
    packed = all_of(lambda q, k, v: flash_attention(q, k, v, cu_q=tq, cu_k=None if same else tk, causal=causal), q, k, v, g)
    def apart(q, k, v):
        parts = [q[:, :, a:b]*0 if c == d else attention_ref(q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], causal_mask(b-a, d-c) if causal else None)
            for a, b, c, d in zip(tq, tq[1:], tk, tk[1:])]
        return torch.cat([*parts, q[:, :, tq[-1]:]*0], 2) + 0*(k.sum() + v.sum())
    for a, b in zip(packed, all_of(apart, q, k, v, g)): assert torch.allclose(a, b, atol=1e-12)


@quick
@given(T=st.integers(0, 70), S=st.integers(0, 70), tile=st.tuples(st.integers(1, 20), st.integers(1, 20)), causal=st.booleans(), pad=st.none() | st.lists(st.integers(0, 70), min_size=1, max_size=3))
def test_schedule_covers_what_is_seen_once(T, S, tile, causal, pad):
    runs = key_runs(T, S, causal, pad and torch.tensor(pad).clamp_max(S))
    seen, n = visible(runs, torch.arange(S)), torch.zeros(T, S, dtype=torch.long)
    for i, j, full in schedule(runs, S, tile):
        n[i, j] += 1
        assert not full or seen[:, i, j].all()
    assert (n <= 1).all() and (n.bool() | ~seen.any(0)).all()
    assert (runs.diff(dim=-1) >= 0).all()


def test_full_tiles_are_not_masked():
    "Half of the tiles of a causal square are skipped, and only the diagonal pays for a mask"
    tiles = schedule(key_runs(640, 640), 640, (64, 64))
    assert len(tiles) == 55 and sum(not full for *_, full in tiles) == 10


# --- A09: head mapping -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('H,K', [(6, 2), (4, 1), (16, 2), (3, 3)])
def test_heads(H, K):
    q, k = torch.zeros(1, H, 5, 4), torch.zeros(1, K, 5, 4)
    v = torch.arange(1., K+1).view(1, K, 1, 1).expand(1, K, 5, 4).clone().requires_grad_()
    o = flash_attention(q, k, v); o.backward(torch.ones_like(o))
    assert torch.allclose(o[0, :, 0, 0], torch.arange(1., K+1).repeat_interleave(H//K))
    assert torch.allclose(v.grad.sum(2), torch.full((1, K, 4), 5.*H/K))
    if (H, K) == (6, 2): assert torch.allclose(v.grad[0, :, :, 0], torch.tensor([6.85, 3.85, 2.35, 1.35, .60]).expand(2, 5))


def test_heads_that_do_not_divide():
    with pytest.raises(ValueError, match='k has 4 heads, q has 6'): flash_attention(torch.zeros(1, 6, 5, 4), *torch.zeros(2, 1, 4, 5, 4))


def test_a_group_of_one_is_plain_attention():
    "Head after head, alone, gives the same to rounding (which product a CPU library takes for a shape is its own affair); tests/gpu asks for the bits"
    q, k, v = (t.detach() for t in qkv(2, 3, 3, 70, 70, 16, F32))
    whole = flash_attention(q, k, v)
    for h in range(3): assert torch.allclose(whole[:, h:h+1], flash_attention(q[:, h:h+1], k[:, h:h+1], v[:, h:h+1]), rtol=0, atol=1e-6)


# --- A10: q_len is not kv_len ------------------------------------------------------------------------------------------
@pytest.mark.parametrize('T,S,want', [(2, 5, [1.5, 2.]), (1, 7, [3.]), (3, 3, [0., .5, 1.]), (5, 2, [0., 0., 0., 0., .5])])
def test_bottom_right(T, S, want):
    q, k = torch.zeros(1, 1, T, 4, requires_grad=True), torch.zeros(1, 1, S, 4, requires_grad=True)
    v = torch.arange(float(S)).view(1, 1, S, 1).expand(1, 1, S, 4).clone().requires_grad_()
    o, L = flash_attention(q, k, v, lse=True); o.sum().backward()
    assert torch.allclose(o[0, 0, :, 0], torch.tensor(want), atol=1e-6)
    assert all(t.grad.isfinite().all() for t in (q, k, v)) and torch.equal(L[0, 0].isneginf(), torch.arange(T) < T-S)


def test_a_row_that_sees_nothing_hurts_nobody():
    q, k, v = qkv(3, 4, 2, 9, 9, 8, F32)
    o, L = flash_attention(q, k, v, pad=torch.tensor([0, 9, 4]), lse=True)
    (o.square().sum() + L[L.isfinite()].sum()).backward()
    assert not o[1].any() and not any(t.grad[1].any() for t in (q, k, v)) and v.grad[0].any() and q.grad[2].any()
    assert all(t.isfinite().all() for t in (o, q.grad, k.grad, v.grad))


# --- A12: odd sizes, large logits, dtypes ------------------------------------------------------------------------------
@pytest.mark.parametrize('dtype', [F32, BF16, F16])
@pytest.mark.parametrize('S', [1, 2, 17, 63, 64, 65, 127, 129])
def test_odd_sizes(S, dtype):
    R, err = random.Random(S), {}
    for D in (16, 63, 64, 80, 96, 128, 192, 256):
        torch.manual_seed(S+D)
        causal = R.random() < .5
        q, k, v = qkv(1, 2, 1, S, S, D, dtype); g = torch.randn(1, 2, S, D).to(dtype)
        mask = visible(key_runs(S, S, causal), torch.arange(S))[:, None]
        exact = all_of(lambda *x: attention_ref(*x, mask), *(t.detach().double().requires_grad_() for t in (q, k, v)), g.double())
        peers = [all_of(lambda *x: attention_ref(*x, mask), q, k, v, g),
                 all_of(lambda *x: torch.nn.functional.scaled_dot_product_attention(*x, is_causal=causal, enable_gqa=True), q, k, v, g)]
        ours = all_of(lambda *x: flash_attention(*x, causal=causal), q, k, v, g)
        for who, result in zip(('ours', 'plain', 'sdpa'), (ours, *peers)):
            for x, a, e in zip('o dq dk dv'.split(), result, exact):
                assert a.dtype == dtype and a.isfinite().all()
                err[x, who] = err.get((x, who), 0) + (a.double()-e).square().sum().item()/(e.square().mean().item() or 1)/e.numel()
        if S == 1: assert torch.equal(ours[0], v.expand_as(ours[0]))
    # with two keys dS is what is left of a difference, and the sum in it is taken from `o` as it was rounded
    for x in 'o dq dk dv'.split(): assert err[x, 'ours']**.5 <= (2 if S > 2 else 4)*max(err[x, 'plain'], err[x, 'sdpa'])**.5 + 1e-6, err


def test_large_logits():
    q, k, v = (t.detach()*300 for t in qkv(1, 2, 2, 40, 40, 16))
    assert torch.allclose(flash_attention(q, k, v), attention_ref(q, k, v, causal_mask(40, 40)), rtol=1e-9)
    assert flash_attention(q.float(), k.float(), v.float()).isfinite().all()


@pytest.mark.parametrize('scale', [-.3, 0., 2.])
def test_any_scale(scale):
    q, k, v = qkv(1, 2, 1, 20, 20, 8); g = torch.randn_like(q)
    a = all_of(lambda *x: flash_attention(*x, scale=scale), q, k, v, g)
    for x, y in zip(a, all_of(lambda *x: attention_ref(*x, causal_mask(20, 20), scale), q, k, v, g)): assert torch.allclose(x, y, atol=1e-12)


# --- A16: the same bits ------------------------------------------------------------------------------------------------
def test_same_bits_every_time():
    q, k, v = qkv(2, 4, 2, 100, 100, 16, F32); g = torch.randn_like(q)
    first = all_of(flash_attention, q, k, v, g)
    for _ in range(20): assert all(torch.equal(a, b) for a, b in zip(first, all_of(flash_attention, q, k, v, g)))


# --- as an op ----------------------------------------------------------------------------------------------------------
def test_gradient_of_everything_by_torchs_own_check():
    q, k, v = qkv(1, 4, 2, 3, 4, 3)
    assert torch.autograd.gradcheck(lambda *x: flash_attention(*x, lse=True), (q, k, v))
    cu = torch.tensor([0, 1, 3]), torch.tensor([0, 3, 4])
    assert torch.autograd.gradcheck(lambda *x: flash_attention(*x, cu_q=cu[0], cu_k=cu[1]), (q, k, v))


def test_strides_and_expanded_gradients():
    q, k, v = qkv(2, 4, 2, 9, 9, 8)
    a = all_of(flash_attention, q, k, v, torch.ones(1, 1, 1, 1).double().expand(2, 4, 9, 8))
    b = all_of(flash_attention, *(t.detach().contiguous().requires_grad_() for t in (q, k, v)), torch.ones(2, 4, 9, 8).double())
    for x, y in zip(a, b): assert torch.allclose(x, y, atol=1e-13)
    wide = torch.randn(2, 9, 3, 8, 2).double()[..., 0].transpose(1, 2)   # last axis not contiguous either
    assert torch.allclose(flash_attention(wide, wide, wide), flash_attention(*(wide.contiguous(),)*3))


def test_empty():
    for B, H, K, T, S in [(0, 2, 1, 3, 3), (1, 2, 1, 0, 3), (1, 2, 1, 3, 0), (1, 2, 1, 0, 0)]:
        q, k, v = qkv(B, H, K, T, S, 4)
        o, L = flash_attention(q, k, v, lse=True); o.sum().backward()
        assert o.shape == (B, H, T, 4) and L.shape == (B, H, T) and not o.any() and not k.grad.any()


def test_no_second_derivative():
    q, k, v = qkv(1, 1, 1, 3, 3, 2)
    with pytest.raises(RuntimeError, match='does not require grad|once_differentiable'):
        torch.autograd.grad(torch.autograd.grad(flash_attention(q, k, v).sum(), q, create_graph=True)[0].sum(), q)


@pytest.mark.parametrize('change,match', [
    (dict(q=torch.zeros(2, 3)), 'q must have shape'), (dict(q=torch.zeros(1, 2, 3, 4, dtype=torch.long)), 'q must be floating-point'), (dict(k=torch.zeros(1, 2, 3, 5)), 'k must have shape'),
    (dict(v=torch.zeros(1, 2, 3, 4).double()), 'v must be torch.float32'), (dict(v=torch.zeros(1, 2, 4, 4)), 'v must have shape'), (dict(pad=torch.zeros(3, dtype=torch.long)), 'pad must have shape'),
    (dict(pad=torch.zeros(1)), 'pad must hold integers'), (dict(cu_k=torch.tensor([0, 3])), 'cu_k needs cu_q'), (dict(cu_q=torch.tensor([0.])), 'cu_q must hold integers'),
    (dict(cu_q=torch.tensor([0])), 'cu_q must hold at least 2'), (dict(cu_q=torch.tensor([0, 4])), 'cu_q must ascend from 0 to at most 3'), (dict(cu_q=torch.tensor([1, 3])), 'must ascend from 0'),
    (dict(cu_q=torch.tensor([0, 3]), cu_k=torch.tensor([0, 2, 3])), 'cu_k must have shape'), (dict(cu_q=torch.tensor([0, 3]), pad=torch.zeros(1, dtype=torch.long)), 'pad and cu_q exclude'),
], ids=lambda x: x.replace(' ', '-') if isinstance(x, str) else '')
def test_faults(change, match):
    args = dict(q=torch.zeros(1, 2, 3, 4), k=torch.zeros(1, 2, 3, 4), v=torch.zeros(1, 2, 3, 4)) | change
    with pytest.raises(ValueError, match=match): flash_attention(**args)


def test_compiles_without_a_break():
    for T, S, pad in ((70, 70, None), (3, 70, torch.tensor([0, 20]))):
        q, k, v = qkv(2, 4, 2, T, S, 8, F32); g = torch.randn_like(q)
        f = lambda *x: flash_attention(*x, pad=pad)
        torch._dynamo.reset()
        for a, b in zip(all_of(torch.compile(f, fullgraph=True, backend='aot_eager'), q, k, v, g), all_of(f, q, k, v, g)): assert torch.allclose(a, b, atol=1e-5)


def test_nothing_grows_with_the_square():
    "Neither what is kept nor what is made on the way"
    from xtrain.ops.contract import Traffic
    def fresh(T):
        q, k, v = (t.detach() for t in qkv(1, 2, 1, T, T, 16, F32))
        biggest = 0
        class Largest(Traffic):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                nonlocal biggest
                out = func(*args, **(kwargs or {}))
                if isinstance(out, torch.Tensor): biggest = max(biggest, out.untyped_storage().nbytes())
                return out
        with Largest(): flash_forward(q, k, v, key_runs(T, T), .25)
        return biggest
    assert fresh(1024) <= 2*fresh(512) < 4*1024*1024


# --- in a model --------------------------------------------------------------------------------------------------------
CFG = ModelConfig(vocab_size=61, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, ffn_dim=48, max_seq_len=128)


@pytest.mark.parametrize('recompute', [False, True])
def test_model_equals_composed(recompute):
    ids = torch.randint(0, 61, (2, 90))
    def run(path):
        m = TinyTransformer(CFG, seed=1, attention=path, dtype=F64, recompute=recompute).double()
        loss = m.loss(ids[:, :-1], ids[:, 1:]); loss.backward()
        return m(ids).detach(), loss.detach(), {n: p.grad for n, p in m.params().items()}
    (a, la, ga), (b, lb, gb) = run('flash'), run('composed')
    assert torch.allclose(a, b, atol=1e-11) and abs(la-lb) < 1e-7
    for n in ga: assert rel_error(ga[n], gb[n]) < 1e-6, n   # the loss itself is float32


def test_generates_the_same_tokens():
    from xtrain.generate import generate
    m = TinyTransformer(CFG, seed=1, std=.2)
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    want = generate(m, prompts, max_tokens=20, temperature=0)
    m.attention = 'flash'
    assert m.path == 'flash' and generate(m, prompts, max_tokens=20, temperature=0) == want == generate(m, prompts, max_tokens=20, temperature=0, cache=False)


def test_padding_in_the_op_of_the_model():
    q, k, v = (t.detach() for t in qkv(2, 4, 2, 6, 6, 8)); pad = torch.tensor([0, 3])
    assert torch.allclose(attention(q, k, v, pad, 'flash'), attention(q, k, v, pad, 'composed'), atol=1e-12)


def test_the_function_is_the_op():
    q, k, v = qkv(1, 2, 1, 5, 5, 4)
    assert torch.equal(FlashTiles.apply(q, k, v, key_runs(5, 5), .5)[0], flash_attention(q, k, v))


# --- its bench ---------------------------------------------------------------------------------------------------------
def test_bench_attention(tmp_path):
    import json
    from click.testing import CliRunner
    from xtrain.cli import main
    png = tmp_path/'a.png'
    p = CliRunner().invoke(main, ['bench', 'attention', '--shape', '1,32,4,2,8', '--json', '--device', 'cpu', '--picture', str(png)])
    r = json.loads(p.stdout)
    assert p.exit_code == 0 and {x['who'] for x in r['rows']} == {'flash', 'sdpa', 'composed'} and png.read_bytes()[:4] == b'\x89PNG'
    for x in r['rows']: assert x['shape'] == [1, 32, 4, 2, 8] and x['forward']*x['forward_ms'] == pytest.approx(4*4*32*32*8/2*1e3)


def test_bench_asks_flash_attention_4_where_it_is_installed(tmp_path, monkeypatch):
    "With a package in its place that takes and returns what it does: tokens before heads, the result and its log-sum-exp"
    import sys
    from xtrain.bench_attention import no_fa4, peers
    def forget():
        for n in [n for n in sys.modules if n.split('.')[0] == 'flash_attn']: monkeypatch.delitem(sys.modules, n)
    forget()
    shape, where = (1, 9, 4, 2, 8), torch.device('cuda')
    if no_fa4() is not None: assert 'pip install flash-attn-4' in no_fa4() and 'FA4' not in peers(where, shape)
    cute = tmp_path/'flash_attn'/'cute'; cute.mkdir(parents=True)
    (cute/'__init__.py').write_text("""import torch
def flash_attn_func(q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, deterministic=False):
    assert causal
    o = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=True)
    return o.transpose(1, 2)*(2 if deterministic else 1), o[..., 0]
""")
    monkeypatch.syspath_prepend(tmp_path); forget()
    q, k, v = (t.detach() for t in qkv(1, 4, 2, 9, 9, 8, F32))
    found, want = peers(where, shape), attention_ref(q, k, v, causal_mask(9, 9))
    assert no_fa4() is None
    for n, name in enumerate(('FA4', 'FA4 deterministic'), 1): assert torch.allclose(found[name][0](q, k, v), n*want, atol=1e-6)
    (cute.parent/'__init__.py').write_text('raise OSError("no libcudart")'); forget()
    assert no_fa4() == 'OSError: no libcudart' and 'FA4' not in peers(where, shape)


@pytest.mark.parametrize('args,why', [(['--shape', '1,32,4,3,8'], 'multiple of KV heads'), (['--shape', '1,32'], 'five numbers'), (['--shape', '1,a,2,2,2'], 'whole numbers'), (['--picture', 'where'], 'a PNG is drawn')])
def test_bench_attention_refuses(args, why):
    from click.testing import CliRunner
    from xtrain.cli import main
    p = CliRunner().invoke(main, ['bench', 'attention', *args])
    assert p.exit_code and why in p.output + str(p.exception) + p.stderr


# --- its kernels -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('name,cap', [('flash_128', (9, 0)), ('flash_96', (8, 0)), ('flash_plain', (12, 0))])
def test_kernels_compile_without_spills(name, cap):
    "No warning, no register spilled, and no wgmma that the assembler makes wait for the one before (C7510 to C7514)"
    import os, subprocess
    import xtrain.kernels as k
    from test_kernels import declared, report
    nvcc, why = k.find_nvcc(13)
    if not nvcc: pytest.skip(why)
    cmd = [c for c in k.command(k.gencode([cap], []))[0] if c != '-shared']
    r = subprocess.run([*cmd, '-fatbin', '-Werror', 'all-warnings', '-Xptxas', '-v', f'-I{k.csrc_path()}', '-DXTRAIN_NS=xtrain_test', str(k.csrc_path()/f'{name}.cu'), '-o', os.devnull], capture_output=True, text=True)
    out = r.stdout + r.stderr
    assert r.returncode == 0 and 'C75' not in out, out[-2000:]
    own = {n: b for n,b in declared(out).items() if 'join_many' not in n and 'sum_parts' not in n} # those have 99 KiB for themselves
    assert max(own.values()) <= 1024, own # what every launch leaves of the 99 KiB (OWN_MOST in flash.cuh)
    if cap == (9, 0): assert max(b for n,b in own.items() if 'backward_one_sm90' in n) <= 256
    kernels = [x for ks in report(out).values() for x in ks]
    assert len(kernels) >= 8 and not [x for x in kernels if x[2]], kernels
