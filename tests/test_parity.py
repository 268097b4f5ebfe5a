"Bit-equality with transformers' Qwen3, Qwen2 and Llama, loaded from our own exports; every gradient; and each rounding point, broken once."
import inspect, warnings
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch, torch.nn.functional as F

transformers = pytest.importorskip('transformers')

import xtrain.model
from xtrain.config import ModelConfig
from xtrain.generate import KVCache
from xtrain.hf import export_hf, import_model, tensor_map
from xtrain.model import Block, TinyTransformer
from xtrain.ops.attention import causal_mask
from xtrain.ops.repeat_kv import repeat_kv
from xtrain.ops.rms_norm import rms_norm
from xtrain.ops.rope import rope, rope_tables, rotate_half

F32, BF16 = torch.float32, torch.bfloat16
BASE = ModelConfig(101, 48, 2, 6, 2, 16, 96, max_seq_len=256)
CONFIGS = {
    'gqa': BASE, 'mha': replace(BASE, n_kv_heads=6), 'mqa': replace(BASE, n_kv_heads=1),
    'tied': replace(BASE, tied=True, rope_theta=1e6), 'tied mqa': replace(BASE, tied=True, n_kv_heads=1, vocab_size=97),
    'odd': ModelConfig(103, 30, 3, 5, 1, 10, 51, max_seq_len=256, eps=1e-5),          # nothing is a power of two, H*D > dim
    'narrow heads': ModelConfig(257, 96, 1, 4, 2, 6, 33, max_seq_len=256),            # H*D < dim
    'wide heads': ModelConfig(256, 24, 2, 4, 2, 128, 40, max_seq_len=256),
    'one of each': ModelConfig(2, 2, 1, 1, 1, 2, 1, max_seq_len=256),
    'larger': ModelConfig(1000, 256, 1, 8, 2, 32, 512, max_seq_len=256),
    'llama': replace(BASE, qk_norm=False), 'llama tied': replace(BASE, qk_norm=False, tied=True, n_kv_heads=1, rope_theta=5e5, eps=1e-5), 'llama odd': ModelConfig(103, 30, 3, 5, 1, 10, 51, max_seq_len=256, qk_norm=False),
    'qwen2': replace(BASE, qk_norm=False, qkv_bias=True), 'qwen2 tied': replace(BASE, qk_norm=False, qkv_bias=True, tied=True, n_kv_heads=6, rope_theta=1e6), 'qwen2 odd': ModelConfig(103, 30, 3, 5, 1, 10, 51, max_seq_len=256, eps=1e-5, qk_norm=False, qkv_bias=True),
    'qwen2 larger': ModelConfig(1000, 256, 1, 8, 2, 32, 512, max_seq_len=256, qk_norm=False, qkv_bias=True),
}

def tokens(cfg, *shape, seed=0): return torch.randint(cfg.vocab_size, shape, generator=torch.Generator().manual_seed(seed + sum(shape)))

@pytest.fixture(scope='session')
def exported(tmp_path_factory):
    "An exported directory for each configuration, made once: large weights, gains that are not one, biases that are not zero"
    made = {}
    def get(cfg):
        if cfg not in made:
            m, g, d = TinyTransformer(cfg, seed=1, std=.1), torch.Generator().manual_seed(2), tmp_path_factory.mktemp('parity')/'model'
            with torch.no_grad():
                for p in m.parameters():
                    if p.ndim == 1: p.mul_(1 + .2*torch.randn(p.shape, generator=g)).add_((p == 0)*torch.randn(p.shape, generator=g))
            export_hf(m, None, d)
            made[cfg] = d, m
        return made[cfg]
    return get

def theirs_from(d, dtype):
    transformers.utils.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        m, info = transformers.AutoModelForCausalLM.from_pretrained(d, dtype=dtype, attn_implementation='eager', output_loading_info=True)
    return m.eval(), info

def pair(exported, cfg, dtype):
    d, _ = exported(cfg)
    theirs, info = theirs_from(d, dtype)
    assert not any(info[k] for k in ('missing_keys', 'unexpected_keys', 'mismatched_keys')) and type(theirs).__name__ == {(True, False): 'Qwen3ForCausalLM', (False, True): 'Qwen2ForCausalLM', (False, False): 'LlamaForCausalLM'}[cfg.qk_norm, cfg.qkv_bias]
    return import_model(d, attention='composed', dtype=dtype), theirs

def their_logits(m, ids, past):
    "transformers renamed the argument for the cache in 5.x"
    return m(ids, **{'cache' if 'cache' in inspect.signature(m.forward).parameters else 'past_key_values': past}).logits

both = pytest.mark.parametrize('dtype', [F32, BF16], ids=['float32','bfloat16'])
each = pytest.mark.parametrize('name', list(CONFIGS))

@torch.no_grad()
@both
@each
def test_prefill_is_bit_equal(exported, name, dtype):
    cfg = CONFIGS[name]; ours, theirs = pair(exported, cfg, dtype)
    for B,T in ((1,1), (1,2), (2,7), (3,37), (2,64), (1,129)):
        ids = tokens(cfg, B, T)
        a, b = ours(ids), theirs(ids).logits
        assert a.dtype == b.dtype == dtype and torch.equal(a, b), (B, T, (a != b).sum())

@torch.no_grad()
@both
@each
def test_cached_decode_is_bit_equal(exported, name, dtype):
    cfg = CONFIGS[name]; ours, theirs = pair(exported, cfg, dtype)
    for B,T in ((1,1), (3,9), (2,64)):
        ids, cache, past = tokens(cfg, B, T+5), KVCache(cfg, B, T+5, dtype), transformers.DynamicCache()
        for a,b in [(0, T)] + [(t, t+1) for t in range(T, T+5)]:
            assert torch.equal(ours(ids[:, a:b], cache), their_logits(theirs, ids[:, a:b], past)), (B, T, a)

@torch.no_grad()
@both
@pytest.mark.parametrize('name', ['gqa','mha','odd','llama','qwen2'])
def test_chunked_prefill_is_bit_equal(exported, name, dtype):
    cfg = CONFIGS[name]; ours, theirs = pair(exported, cfg, dtype)
    ids, cache, past = tokens(cfg, 2, 40), KVCache(cfg, 2, 40, dtype), transformers.DynamicCache()
    for a,b in ((0, 7), (7, 8), (8, 31), (31, 40)): assert torch.equal(ours(ids[:, a:b], cache), their_logits(theirs, ids[:, a:b], past)), a

@torch.no_grad()
@both
@each
def test_left_padded_batch_is_bit_equal(exported, name, dtype):
    cfg = CONFIGS[name]; ours, theirs = pair(exported, cfg, dtype)
    ids, pad = tokens(cfg, 3, 21), torch.tensor([0, 5, 20])
    mask = (torch.arange(21) >= pad[:, None]).long()
    a, b = ours(ids, pad=pad), theirs(ids, attention_mask=mask, position_ids=(mask.cumsum(-1)-1).clamp_min(0)).logits
    assert torch.equal(a[mask.bool()], b[mask.bool()])

@torch.no_grad()
@pytest.mark.parametrize('name', ['gqa','tied','odd','llama tied','qwen2 odd'])
def test_greedy_tokens_are_the_same(exported, name):
    cfg = CONFIGS[name]; ours, theirs = pair(exported, cfg, F32)
    ids = tokens(cfg, 2, 5)
    want = theirs.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=0, eos_token_id=None)
    cache, out = KVCache(cfg, 2, 29), ids
    new = ours(ids, cache)[:, -1:].argmax(-1)
    for _ in range(24):
        out = torch.cat((out, new), 1)
        if out.shape[1] < 29: new = ours(new, cache).argmax(-1)
    assert torch.equal(out, want)

@each
def test_every_gradient(exported, name):
    cfg = CONFIGS[name]; ours, theirs = pair(exported, cfg, F32)
    ids, targets = tokens(cfg, 3, 33), tokens(cfg, 3, 33, seed=1)
    targets[1, :9] = -100
    loss, ref = ours.loss(ids, targets), F.cross_entropy(theirs(ids).logits.float().flatten(0, 1), targets.flatten())
    loss.backward(); ref.backward()
    assert abs(loss.item()-ref.item()) < 1e-6*ref.item()
    params, rows = dict(theirs.named_parameters()), tensor_map(cfg)
    assert len(rows) == len(params) == len(cfg.shapes())
    for o,h,transposed in rows:
        g, want = ours.params()[o].grad, params[h].grad.t() if transposed else params[h].grad
        assert (g-want).norm() <= (1e-4 if o.endswith('bk') else 1e-5)*want.norm(), (o, ((g-want).norm()/want.norm()).item())     # A key's bias: nearly all of its gradient cancels in softmax

def test_bfloat16_gradients_are_as_good_as_theirs(exported):
    _, exact = pair(exported, BASE, F32); ours, theirs = pair(exported, BASE, BF16)
    ids, targets = tokens(BASE, 3, 33), tokens(BASE, 3, 33, seed=1)
    ours.loss(ids, targets).backward()
    for m in (exact, theirs): F.cross_entropy(m(ids).logits.float().flatten(0, 1), targets.flatten()).backward()
    ratios = []
    for o,h,transposed in tensor_map(BASE):
        want, a, b = (g.double().t() if t else g.double() for g,t in ((dict(exact.named_parameters())[h].grad, transposed), (ours.params()[o].grad, False), (dict(theirs.named_parameters())[h].grad, transposed)))
        ratios.append(((a-want).norm()/(b-want).norm()).item())
        assert (a-want).norm() < .06*want.norm(), o
    assert max(ratios) < 2 and .8 < sorted(ratios)[len(ratios)//2] < 1.25

def test_import_is_the_export_rounded(exported):
    for cfg in (BASE, CONFIGS['tied']):
        d, m = exported(cfg)
        back = import_model(d)
        for n,p in m.params().items(): assert torch.equal(back.params()[n], p.to(BF16).float()), n

# ---- this comparison can fail ----------------------------------------------------------------------------------------

def rms_once(x, w, eps): return (w.float()*x.float()*(x.float().pow(2).mean(-1, keepdim=True)+eps).rsqrt()).to(x.dtype)
def rope_f32(x, cos, sin):
    c, s = rope_tables(torch.arange(x.shape[2]), x.shape[-1], 1e4)
    return (x.float()*c + rotate_half(x.float())*s).to(x.dtype)
def composed(q, k, v, scale_first=False, tiled=False):
    rep = (lambda t: t.repeat(1, 3, 1, 1)) if tiled else (lambda t: repeat_kv(t, 3))
    k, v, c = rep(k), rep(v), q.shape[-1]**-.5
    s = ((q*c) @ k.transpose(2, 3) if scale_first else q @ k.transpose(2, 3) * c).masked_fill(~causal_mask(q.shape[2], k.shape[2]), torch.finfo(q.dtype).min)
    return s.softmax(-1, dtype=F32).to(q.dtype) @ v
def stream_f32(self, x, *a):
    x = x.float() + self.attend(rms_norm(x.float(), self.attn_norm.float(), self.cfg.eps).to(BF16), *a)
    return x + self.feed(rms_norm(x, self.ffn_norm.float(), self.cfg.eps).to(BF16))
BROKEN = {
    'nothing': {}, 'rms_norm rounds once': dict(rms_norm=rms_once), 'rope in float32': dict(qk_norm_rope=lambda x, w, cos, sin, eps: rope_f32(rms_norm(x, w, eps).transpose(1, 2), cos, sin)),
    'add_rms_norm rounds once': dict(add_rms_norm=lambda x, res, w, eps: (rms_once(x + res, w, eps), x + res)), 'qk-norm rounds once': dict(qk_norm_rope=lambda x, w, cos, sin, eps: rope(rms_once(x, w, eps).transpose(1, 2), cos, sin)), 'scale first': dict(attention=lambda q, k, v, **_: composed(q, k, v, scale_first=True)),
    'kv heads tiled': dict(attention=lambda q, k, v, **_: composed(q, k, v, tiled=True)), 'stream in float32': dict(rms_norm=lambda x, w, eps: rms_norm(x.to(BF16), w, eps), stream=stream_f32), 'sdpa': dict(path='sdpa'),
    'q_norm lost': dict(lose='q_norm'), 'eps': dict(eps=1e-3), 'theta': dict(theta=1.1e4), 'gate and up swapped': dict(swap=('w_gate','w_up')), 'norms swapped': dict(swap=('attn_norm','ffn_norm')),
}

@torch.no_grad()
@pytest.mark.parametrize('what', list(BROKEN))
def test_each_broken_point_shows(exported, what):
    cfg, kw = replace(BASE, head_dim=32), dict(BROKEN[what])
    ours, theirs = pair(exported, cfg, BF16)
    path, stream, lose, swap = kw.pop('path', 'composed'), kw.pop('stream', Block.forward), kw.pop('lose', None), kw.pop('swap', None)
    ours.attention = path
    if 'eps' in kw or 'theta' in kw:
        ours.cfg = replace(cfg, eps=kw.pop('eps', cfg.eps), rope_theta=kw.pop('theta', cfg.rope_theta))
        for b in ours.blocks: b.cfg = ours.cfg
    for b in ours.blocks:
        if lose: getattr(b, lose).fill_(1)
        if swap: x, y = (getattr(b, n) for n in swap); t = x.clone(); x.copy_(y); y.copy_(t)
    ids = tokens(cfg, 2, 37)
    with patch.multiple(xtrain.model, **kw) if kw else warnings.catch_warnings(), patch.object(Block, 'forward', stream): got = ours(ids)
    assert torch.equal(got, theirs(ids).logits) == (what == 'nothing')

def test_transformers_says_nothing_about_prefixed_names_but_we_look(exported, tmp_path):
    "A file with stray prefixes loads without an exception, into random weights: only the lists tell"
    from safetensors.torch import load_file, save_file
    d, _ = exported(BASE)
    (tmp_path/'config.json').write_text((d/'config.json').read_text())
    save_file({'_orig_mod.'+n: t for n,t in load_file(d/'model.safetensors').items()}, tmp_path/'model.safetensors', metadata=dict(format='pt'))
    theirs, info = theirs_from(tmp_path, F32)
    assert len(info['missing_keys']) == len(info['unexpected_keys']) == 25

def test_their_config_reads_as_ours(exported):
    for cfg in CONFIGS.values():
        c = transformers.AutoConfig.from_pretrained(exported(cfg)[0])
        assert (c.vocab_size, c.hidden_size, c.num_hidden_layers, c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.intermediate_size, c.max_position_embeddings, c.rms_norm_eps, c.tie_word_embeddings) == \
               (cfg.vocab_size, cfg.dim, cfg.n_layers, cfg.n_heads, cfg.n_kv_heads, cfg.head_dim, cfg.ffn_dim, cfg.max_seq_len, cfg.eps, cfg.tied)
        theta = getattr(c, 'rope_theta', None) or c.rope_parameters['rope_theta']
        assert theta == cfg.rope_theta
