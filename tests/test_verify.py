"verify: sound exports pass, every planted mistake is caught by numbers alone, and nothing an engine does is a crash."
import json, math, os, re, shlex, shutil, signal, subprocess, sys, time
from dataclasses import replace
from pathlib import Path
import pytest, torch
from safetensors.torch import load_file, save_file
from xtrain import engines as E, plugins as P, selftest as S, verify as V
from xtrain.config import ModelConfig, UserError
from xtrain.generate import generate
from xtrain.hf import export_hf, import_hf
from xtrain.model import TinyTransformer
from xtrain.tokenizer import Tokenizer

TEXTS = ['Once upon a time there was a small red fox. One day the fox found a warm stone and slept on it. ']*20 + ['The little cat had a ball. She liked the ball, and the ball liked her.']*20
PROMPTS = ['Once upon a time', 'One day', 'The little', 'She liked the', 'a warm stone', 'fox', '42', 'é ☃']
MODELS = { # 8 heads on 2; head_dim free of dim/heads; head tied. The first and the last with square projections
    'gqa': dict(dim=256, n_layers=2, n_heads=8, n_kv_heads=2, head_dim=32, ffn_dim=192),
    'free head_dim': dict(dim=48, n_layers=2, n_heads=6, n_kv_heads=2, head_dim=32, ffn_dim=80, rope_theta=1e6, eps=1e-5),
    'tied': dict(dim=64, n_layers=3, n_heads=8, n_kv_heads=2, head_dim=8, ffn_dim=64, tied=True),
}
ALL = ['transformers-f32', 'transformers-bf16', 'llama.cpp-f32', 'llama.cpp-bf16']

@pytest.fixture(scope='module')
def tok(): return Tokenizer.train(TEXTS, 320)

@pytest.fixture(scope='module', autouse=True)
def one_thread():
    n = torch.get_num_threads(); torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)

def make(tok, name, rows=0, seed=0):
    "A model with gains that are not one, so that a lost gain is a difference"
    m = TinyTransformer(ModelConfig(tok.vocab_size+rows, **MODELS[name] | dict(max_seq_len=128)), seed=seed, std=.05)
    g = torch.Generator().manual_seed(seed+1)
    with torch.no_grad():
        for p in m.params().values():
            if p.ndim == 1: p.mul_(1 + .3*torch.randn(p.shape, generator=g))
    return m

@pytest.fixture(scope='module')
def models(tok, tmp_path_factory, kept):
    "Three models, trained for a moment on the texts above, and their exports"
    d = tmp_path_factory.mktemp('exports')
    out = {}
    for name in MODELS:
        ids = torch.tensor([i for t in TEXTS for i in tok.encode(t)+[tok.eos_id]*(name == 'tied')]) # one has learnt to end
        ids = ids[:len(ids)//33*33].view(-1, 33)
        m = make(tok, name)
        opt = torch.optim.AdamW(m.params().values(), lr=2e-3)
        for step in range(30):
            b = ids[torch.arange(step*8, step*8+8) % len(ids)]
            m.loss(b[:,:-1], b[:,1:]).backward(); opt.step(); opt.zero_grad()
        export_hf(m, tok, d/name)
        out[name] = m, d/name
    return out

@pytest.fixture(scope='module')
def kept():
    "Engines whose processes serve the whole file: starting one takes seconds"
    class Kept(P.Remote):
        def start(self): # the two dtypes of a program have one process; whoever is asked takes it
            if self.p is None: [e.hand_over(self) for e in engines.values() if e.p is not None and e.shares(self)]
            super().start()
        def close(self, *a, **kw): return 0
    engines = {n: Kept(n) for n in ALL}
    for e in engines.values(): e.start() # while the models are trained
    yield engines
    for e in engines.values(): P.Remote.close(e)

@pytest.fixture(autouse=True)
def keep(monkeypatch, kept):
    "Those engines, in place of new ones"
    for n,e in kept.items(): monkeypatch.setitem(P.ENGINES, n, e)
    find = P.find_engines
    monkeypatch.setattr(V, 'find_engines', lambda specs, timeout=600.: [kept.get(s) or find([s], timeout)[0] if isinstance(s, str) else s for s in specs])

def run(tok, model, dir, **kw): return V.verify((model, tok), dir, **dict(prompts=PROMPTS[:3], max_tokens=12, engines=ALL[:2]) | kw)


@pytest.mark.parametrize('name', MODELS)
def test_sound_export(models, tok, name):
    "Float32 engines: every token of 8 prompts x 48; the composed path in bfloat16: the bits of transformers"
    m, d = models[name]
    r = run(tok, m, d, prompts=PROMPTS, max_tokens=48, engines=ALL)
    f32, bf16, llama, llama16 = r.engines
    assert r.ok and all(c['ok'] for c in r.checks.values()), V.show(r)
    assert (f32.verdict, f32.bit_equal, f32.forks, f32.logprob, f32.kl, f32.loaded, f32.up_to) == ('identical', True, [], 0., 0., True, None)
    assert f32.tokens == [c.tokens for c in r.cases] == llama.tokens
    if name == 'tied': assert any(t[-1] == tok.eos_id for t in f32.tokens) # and ends where the reference ends
    else: assert [len(t) for t in f32.tokens] == [48]*8
    assert bf16.verdict in ('identical', 'near-tie') and bf16.bit_equal # the composed path has transformers' bits in bfloat16 too
    assert 0 < bf16.logprob <= bf16.logprob_bound and 0 < bf16.kl <= bf16.kl_bound
    assert all(f.near_tie for f in bf16.forks + llama16.forks)
    assert llama.verdict == 'identical' and 0 < llama.logprob < 1e-4 and llama.kl < 1e-8 and llama.kl_tokens > 8 # other code: close, not equal
    assert 1e-4 < llama16.logprob <= llama16.logprob_bound

@pytest.mark.parametrize('name', MODELS)
def test_every_planted_fault_is_caught(models, tok, name):
    "By every engine that can see it, on numbers alone; what one cannot see is measured, not assumed"
    m, d = models[name]
    r = S.selftest((m, tok), d, ALL, prompts=PROMPTS[:3], max_tokens=10)
    print(S.show_selftest(r))
    assert r.ok and r.missed == [] and len(r.cells) >= 20
    assert set(r.skipped) <= {'square weight not transposed', 'head_dim missing'} and len(r.skipped) <= 1
    unseen = {(f, e) for f,row in r.cells.items() for e,(state,_) in row.items() if state == 'cannot see'}
    assert {f for f,e in unseen if e.endswith('f32')} <= {'wrong eps'} and ('wrong eps', 'transformers-f32') not in unseen
    assert {f for f,e in unseen} <= {'wrong eps', 'k_norm in place of q_norm', 'q_norm set to ones', 'norms swapped'}
    for f,why in (('prefixed names', 'load'), ('truncated file', 'load'), ('another EOS', 'tokens')): assert [w for _,w in r.cells[f].values()] == [why]*4, f
    assert [w for _,w in r.cells['two ids swapped in the tokenizer'].values()][:2] == ['text']*2
    json.dumps(r.to_dict(), allow_nan=False)

def test_a_miss_is_a_miss(models, tok):
    "An engine that says what the reference says, whatever it loads, is found out"
    m, d = models['tied']
    ref = V.Reference(m, tok)
    class Liar(V.Engine):
        name = 'liar'
        def load(self, dir): pass
        def tokens(self, ids, n): return ref.tokens(ids, n)
        def logits(self, ids): return ref.logits(ids)
    faults = ['vocabulary off by one', 'wrong eps', 'another EOS', 'two ids swapped in the tokenizer', 'truncated file']
    r = S.selftest((m, tok), d, [Liar()], prompts=PROMPTS[:2], max_tokens=4, faults=faults)
    assert not r.ok and r.missed == [f'{f}: liar' for f in faults] and 'MISSED' in S.show_selftest(r)
    class Rough(Liar): # what bfloat16 hides is no miss; what it does not is
        name, exact = 'rough', False
        def logits(self, ids): return ref.logits(ids, torch.bfloat16)
    assert S.selftest((m, tok), d, [Rough()], prompts=PROMPTS[:2], max_tokens=4, faults=faults).missed == [f'{f}: rough' for f in faults if f != 'wrong eps']

class Worn(V.Engine):
    "Loads what it should, until a load fails; from then on nothing, unless `heals` a new process"
    name, heals, broken = 'worn', False, False
    def __init__(self, tok): self.tok = tok
    def load(self, dir):
        try: assert not self.broken; self.m, _ = import_hf(dir)
        except Exception: self.broken = True; raise
        self.m.attention = 'composed'
    def tokens(self, ids, n): return generate(self.m, [ids], n, eos_id=self.tok.stop_ids)[0]
    def logits(self, ids): return self.m(torch.tensor([ids]))[0].detach()
    def close(self): self.broken = self.broken and not self.heals

def test_an_engine_that_loads_nothing_any_more_sees_nothing(models, tok):
    "A refused load is a catch only if the sound export still loads: the state that one fault leaves does not catch the next"
    m, d = models['gqa']
    faults = ['truncated file', 'wrong theta', 'q_norm set to ones']
    r = S.selftest((m, tok), d, [Worn(tok)], prompts=PROMPTS[:2], max_tokens=4, faults=faults)
    assert not r.ok and r.missed == [f'{f}: worn' for f in faults] and "worn missed 'wrong theta': it no longer loads the sound export" in S.show_selftest(r)
    e = Worn(tok); e.heals = True
    r = S.selftest((m, tok), d, [e], prompts=PROMPTS[:2], max_tokens=4, faults=faults)
    assert r.ok and [row['worn'] for row in r.cells.values()] == [('caught', 'load'), ('caught', 'log p'), ('caught', 'log p')]

def test_a_failed_load_is_not_handed_on(evil, tmp_path):
    "An engine that takes a new process for each directory takes one after a load that failed, too"
    e = evil('refuse')
    e.fresh, pids = True, []
    for _ in range(2):
        with pytest.raises(P.EngineError, match='no such tensor'): e.load(tmp_path)
        assert e.p is None
    e.fresh = False
    for _ in range(2):
        with pytest.raises(P.EngineError, match='no such tensor'): e.load(tmp_path)
        pids.append(e.p.pid)
    assert len(set(pids)) == 1

def test_tokens_alone_would_not_do(tok, tmp_path):
    "On a tied model that has learnt nothing, several mistakes change no token at all"
    m = make(tok, 'tied')
    export_hf(m, tok, tmp_path/'hf')
    for planted in ('q_norm set to ones', 'wrong theta', 'wrong eps'):
        S.plant(tmp_path/'hf', tmp_path/planted, planted)
        r = run(tok, m, tmp_path/planted, checks=(), engines=['transformers-f32'])
        assert not r.engines[0].forks and r.engines[0].bit_equal is False and r.verdict == 'structural', planted

@pytest.mark.parametrize('planted', ['wrong theta', 'wrong eps'])
def test_config_is_compared_field_by_field(models, tok, tmp_path, planted):
    m, d = models['gqa']
    S.plant(d, tmp_path/'bad', planted)
    field = {'wrong theta': 'rope_theta', 'wrong eps': 'rms_norm_eps'}[planted]
    assert field in V.config_faults(m.cfg, tok, tmp_path/'bad')[0]
    assert V.config_faults(m.cfg, tok, d) == []

FIELDS = dict(vocab_size=1, hidden_size=1, intermediate_size=1, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=1,
    rope_theta=5., rms_norm_eps=1., tie_word_embeddings=True, max_position_embeddings=1, eos_token_id=7, attention_bias=True, rope_scaling={}, use_sliding_window=True)

@pytest.mark.parametrize('field', FIELDS)
@pytest.mark.parametrize('how', ['changed', 'missing'])
def test_every_field_counts(models, tok, tmp_path, field, how):
    m, d = models['gqa']
    for f in d.iterdir(): (tmp_path/f.name).write_bytes(f.read_bytes())
    c = json.loads((d/'config.json').read_text())
    if how == 'changed': c[field] = FIELDS[field]
    else: del c[field]
    (tmp_path/'config.json').write_text(json.dumps(c))
    assert any(field in f for f in V.config_faults(m.cfg, tok, tmp_path))

@pytest.mark.parametrize('file,key', [('generation_config.json', 'eos_token_id'), ('tokenizer_config.json', 'eos_token')])
def test_all_files_name_the_same_eos(models, tok, tmp_path, file, key):
    m, d = models['gqa']
    for f in d.iterdir(): (tmp_path/f.name).write_bytes(f.read_bytes())
    c = json.loads((d/file).read_text())
    for v in (None, 5 if key.endswith('id') else 'a'):
        (tmp_path/file).write_text(json.dumps(c | {key: v}))
        assert [f for f in V.config_faults(m.cfg, tok, tmp_path) if file in f and key in f]
    if file == 'tokenizer_config.json': return
    r = run(tok, m, tmp_path, engines=['transformers-f32'], max_tokens=2)
    assert r.engines[0].verdict == 'identical' and r.verdict == 'structural' # a field is enough

def test_tensor_headers(models, tok, tmp_path):
    m, d = models['gqa']
    assert V.tensor_faults(m.cfg, d) == []
    assert any('blocks' not in f and 'k_proj' in f and 'shape' in f for f in V.tensor_faults(replace(m.cfg, n_kv_heads=4), d))
    assert V.tensor_faults(replace(m.cfg, tied=True), d) == ['lm_head.weight is not a tensor of this model']
    for f in d.iterdir(): (tmp_path/f.name).write_bytes(f.read_bytes())
    t = load_file(d/'model.safetensors')
    t['model.norm.weight'] = t['model.norm.weight'].float()
    save_file(t, tmp_path/'model.safetensors', {'format':'pt'})
    assert V.tensor_faults(m.cfg, tmp_path) == ['model.norm.weight is F32, torch_dtype says BF16']

def test_prefixed_names_are_not_loaded_in_silence(models, tok, tmp_path):
    m, d = models['gqa']
    S.plant(d, tmp_path/'bad', 'prefixed names')
    r = run(tok, m, tmp_path/'bad', checks=(), engines=ALL[:3])
    assert {(e.verdict, e.loaded) for e in r.engines} == {('structural', False)} and 'missing keys' in r.engines[0].reasons[0]

def test_weights_of_another_checkpoint(models, tok):
    "The check names the tensors"
    m, d = models['gqa']
    other = V.copy.deepcopy(m)
    with torch.no_grad(): other.blocks[1].wq.add_(.01)
    r = run(tok, other, d, engines=['transformers-f32'], max_tokens=2)
    assert r.checks['weights']['faults'] == ['blocks.1.wq is not what the run has'] and r.verdict == 'structural'
    for p in other.parameters(): p.data.mul_(1.01) # trained on, and not exported again: one line that says so
    r = run(tok, other, d, engines=['transformers-f32'], max_tokens=2)
    assert len(r.checks['weights']['faults']) == 1 and 'seems to be of another checkpoint' in V.show(r) and '--overwrite' in V.show(r)

def test_another_tokenizer(models, tok, tmp_path):
    "Same ids, other text: the file and what AutoTokenizer makes of it are both compared"
    m, d = models['gqa']
    for f in d.iterdir(): (tmp_path/f.name).write_bytes(f.read_bytes())
    Tokenizer.train(TEXTS[::-1], 290).save(tmp_path/'tokenizer.json')
    r = run(tok, m, tmp_path, engines=['transformers-f32'], max_tokens=2)
    assert not r.checks['tokenizer']['ok'] and any('other token ids' in w for w in r.engines[0].reasons)

def test_padded_vocabulary(tok, tmp_path):
    "Rows beyond the tokenizer may win on both sides alike"
    m = make(tok, 'gqa', rows=9)
    with torch.no_grad(): m.lm_head[:, -3:].mul_(8)
    export_hf(m, tok, tmp_path/'hf')
    r = run(tok, m, tmp_path/'hf', max_tokens=30, engines=ALL)
    assert r.ok and max(max(c.tokens) for c in r.cases) >= tok.vocab_size

def test_eos(tok, tmp_path):
    "A text that ends is compared up to and with its EOS, id 0 like any other"
    assert tok.eos_id == 0
    m = make(tok, 'gqa')
    said = V.Reference(m, tok).tokens(tok.encode(PROMPTS[0]), 6)[-1]
    with torch.no_grad(): m.lm_head[:, 0] = m.lm_head[:, said]*1.02 # whoever was about to say that, ends
    export_hf(m, tok, tmp_path/'hf')
    r = run(tok, m, tmp_path/'hf', prompts=PROMPTS, max_tokens=20, engines=ALL)
    ended = [c.tokens for c in r.cases if 0 in c.tokens]
    assert r.ok and ended and all(t.index(0) == len(t)-1 for t in ended)
    c, ref = next(c for c in r.cases if 0 in c.tokens), V.Reference(m, tok)
    assert V.first_fork(ref, 0, c, c.tokens + [5, 5]) is None # what comes after the EOS is nobody's business
    assert V.first_fork(ref, 0, c, c.tokens[:-1]).got is None # but it has to come


@pytest.mark.parametrize('how', ['none', 'two'])
def test_no_end_or_two_of_them(tok, tmp_path, how):
    "Every engine stops where the reference does, or like it never"
    if how == 'none': tok = Tokenizer.train(TEXTS, 320, eos=None)
    m = make(tok, 'tied')
    ref = V.Reference(m, tok)
    said = [ref.tokens(tok.encode(p), 9) for p in PROMPTS[:3]]
    if how == 'two':
        tok = Tokenizer(tok.json, tok.eos_token)
        tok.stop_ids = [tok.eos_id, said[0][4]]
    export_hf(m, tok, tmp_path/'hf')
    r = run(tok, m, tmp_path/'hf', engines=ALL)
    assert r.ok, V.show(r)
    assert {len(c.tokens) == 12 for c in r.cases} == ({True} if how == 'none' else {len(c.tokens) == 12 for c in r.cases}) and (how == 'none' or min(len(c.tokens) for c in r.cases) <= 5)


def test_ulp():
    for v in (1e-30, .1, 1., 1.99, 2., 11.77, 300., 6e4):
        x = torch.tensor(v).bfloat16()
        assert V.ulp_bf16(x.item()) == (torch.nextafter(x, torch.tensor(math.inf).bfloat16()).double()-x.double()).item()
        assert V.ulp_bf16(-v) == V.ulp_bf16(v)

def test_near_tie_bound_is_what_rounding_can_do():
    "Round honest logits with hidden errors up to D + u/2 in the worst way: no flip lies beyond the bound, and some come near"
    g = torch.Generator().manual_seed(0)
    f = 4 + 4*torch.rand(20000, 2, generator=g)
    D, u = .05, V.ulp_bf16(7.)
    h = (torch.rand(f.shape, generator=g)*2-1)*(D+u/2)
    e = (f+h).bfloat16().float()
    flip = (f[:,0] > f[:,1]) & (e[:,0] <= e[:,1])
    gap = (f[:,0]-f[:,1])[flip]
    assert len(gap) > 100 and gap.max() <= 2*u + 2*D and gap.max() > .5*(2*u + 2*D)
    assert V.near_tie_bound(torch.tensor([7., 6.9]), torch.tensor([7., 6.95])) == pytest.approx(2*u + 2*.05, abs=1e-6)

def test_kl():
    p, q = torch.tensor([[.25, .75]]).log(), torch.tensor([[.5, .5]]).log()
    assert V.kl_nats(p, q) == pytest.approx(.25*math.log(.5) + .75*math.log(1.5), abs=1e-7)
    g = torch.Generator().manual_seed(0)
    for tau in (1e-4, 1e-2, 1.):
        f = torch.randn(50, 100, generator=g)*3
        e = f + (torch.rand(f.shape, generator=g)*2-1)*tau
        assert V.kl_nats(f, e) <= V.logprob_error(f, e).max().item()**2/2 # Hoeffding

class Fake(E.Engine):
    "An engine that only prints tokens, or falls over"
    name = 'fake'
    def __init__(self, tokens, exact=True): self.answer, self.exact = tokens, exact
    def load(self, dir): pass
    def tokens(self, ids, n): return self.answer(ids, n)

@pytest.fixture
def plug(monkeypatch):
    def add(e): monkeypatch.setitem(V.ENGINES, e.name, e); return [e.name]
    return add

def test_an_engine_of_ones_own(models, tok, plug):
    m, d = models['gqa']
    ref = V.Reference(m, tok)
    good = run(tok, m, d, engines=plug(Fake(ref.tokens)))
    assert good.verdict == 'identical' and good.engines[0].logprob is None
    json.dumps(good.to_dict(), allow_nan=False); V.show(good)

    def second(ids, n): # the runner-up in the first step: how far it is behind decides
        return [ref.logits(ids)[-1].topk(2).indices[1].item(), 1, 1][:n]
    r = run(tok, m, d, engines=plug(Fake(second, exact=False)))
    near = [f.near_tie for f in r.engines[0].forks]
    assert near == [c.margin[0] <= c.bound[0] for c in r.cases] and r.verdict == ('near-tie' if all(near) else 'structural')
    assert run(tok, m, d, engines=plug(Fake(second))).verdict == 'structural' # float32: no fork is excused

    on = run(tok, m, d, engines=plug(Fake(lambda ids, n: ref.tokens(ids, n) + [tok.eos_id, 5, 5])))
    assert on.verdict == 'structural' and on.engines[0].forks[0].want is None # went on where the reference was cut off
    short = run(tok, m, d, engines=plug(Fake(lambda ids, n: ref.tokens(ids, n)[:3], exact=False)))
    assert short.verdict == 'structural' and short.engines[0].forks[0].got is None
    assert json.loads(json.dumps(short.to_dict(), allow_nan=False))['engines'][0]['forks'][0]['gap'] is None
    beyond = run(tok, m, d, engines=plug(Fake(lambda ids, n: [10**6]*n, exact=False)))
    assert beyond.verdict == 'structural' and beyond.engines[0].reasons[0] == 'prompt 1 forks at token 1: no such token' and 'no such token' in V.show(beyond)
    assert 'it went on' in V.show(on) and 'it ended' in V.show(short) and 'inf' not in V.show(on)+V.show(short)+V.show(beyond)

def test_a_near_tie_excuses_bfloat16_only(models, tok, plug):
    m, d = models['free head_dim']
    ref = V.Reference(m, tok)
    cases = {p: ref.case(tok.encode(p), 32, p) for p in PROMPTS}
    p, s = next((p, s) for p,c in cases.items() for s,(gap,bound) in enumerate(zip(c.margin, c.bound)) if gap < .9*bound)
    c = cases[p]
    def flip(ids, n): return c.tokens[:s] + [ref.logits(c.ids+c.tokens[:s])[-1].topk(2).indices[1].item()] + [1]*(n-s-1)
    for exact,verdict in ((False, 'near-tie'), (True, 'structural')):
        r = run(tok, m, d, prompts=[p], max_tokens=32, engines=plug(Fake(flip, exact=exact)))
        f, = r.engines[0].forks
        assert (r.verdict, f.step, f.near_tie) == (verdict, s, True) and abs(f.gap-c.margin[s]) < 1e-3

def test_an_engine_that_falls_over(models, tok, plug):
    m, d = models['gqa']
    def crash(ids, n): raise RuntimeError('no kernel\nsecond line')
    r = run(tok, m, d, engines=plug(Fake(crash)))
    assert r.verdict == 'structural' and r.engines[0].reasons == ['RuntimeError: no kernel']
    assert 'no kernel' in V.show(r)

def test_an_engine_that_is_not_there(models, tok, plug):
    m, d = models['gqa']
    e = Fake(None); e.available = lambda: 'fake is not installed; pip install fake'
    with pytest.raises(UserError, match='pip install fake'): run(tok, m, d, engines=plug(e))
    with pytest.raises(UserError, match="no engine called 'nope'"): run(tok, m, d, engines=['nope'])
    assert V.run_engine(e, d, None, [], []).verdict == 'not run'

def test_nan_is_structural(models, tok, plug):
    m, d = models['gqa']
    ref = V.Reference(m, tok)
    e = Fake(ref.tokens)
    e.logits = lambda ids: torch.full((len(ids), m.cfg.vocab_size), math.nan)
    r = run(tok, m, d, engines=plug(e))
    assert r.verdict == 'structural' and len(r.engines[0].reasons) == 2
    json.dumps(r.to_dict(), allow_nan=False)

def test_reference_leaves_the_model_alone(tok):
    m = make(tok, 'tied')
    before = {n: p.clone() for n,p in m.params().items()}
    V.Reference(m, tok)
    assert all(torch.equal(p, before[n]) and p.dtype == torch.float32 and p.requires_grad for n,p in m.params().items())

@pytest.mark.parametrize('kind', ['nothing', 'file', 'pickle', 'cut', 'no config'])
def test_refusals(models, tok, tmp_path, kind):
    m, d = models['gqa']
    bad = tmp_path/'bad'
    if kind == 'file': bad.write_text('x')
    elif kind != 'nothing':
        bad.mkdir()
        for f in d.iterdir(): (bad/f.name).write_bytes(f.read_bytes())
    if kind == 'pickle':
        (bad/'model.safetensors').unlink(); (bad/'pytorch_model.bin').write_bytes(b'\x80\x02cposix\nsystem\nq\x00X\x0a\x00\x00\x00touch OWNEDq\x01\x85q\x02Rq\x03.')
    if kind == 'cut': (bad/'model.safetensors').write_bytes((d/'model.safetensors').read_bytes()[:-100])
    if kind == 'no config': (bad/'config.json').unlink()
    before = sorted(p.name for p in tmp_path.rglob('*'))
    if kind == 'no config':
        r = run(tok, m, bad); assert r.verdict == 'structural' and 'config.json is missing' in V.show(r)
    else:
        with pytest.raises(UserError) as e: run(tok, m, bad)
        assert 'bad' in str(e.value) and '\n' not in str(e.value)
        if kind == 'pickle': assert 'pickle' in str(e.value)
    assert sorted(p.name for p in tmp_path.rglob('*')) == before

def test_prompts(models, tok, tmp_path):
    m, d = models['gqa']
    for text,why in (('', 'no tokens'), ('fox '*200, '128')):
        with pytest.raises(UserError, match=why): run(tok, m, d, prompts=[text])
    long = tok.decode(tok.encode('fox '*200)[:120]) # fewer new tokens than asked for, where the context ends
    r = run(tok, m, d, prompts=[long], max_tokens=40, engines=ALL)
    assert r.ok and len(r.cases[0].tokens) == 128-len(r.cases[0].ids)
    (tmp_path/'p.txt').write_bytes('\ufeffOne day\n\n  \nThe é\r\n'.encode())
    assert V.read_prompts(tmp_path/'p.txt') == ['One day', 'The é']
    (tmp_path/'p.jsonl').write_text('"a"\n{"prompt": "b"}\r\n{"text": "c\u2028d"}\n"def f():\\n"\n') # JSON may hold the third as it is; what a string ends in is its own
    assert V.read_prompts(tmp_path/'p.jsonl') == ['a', 'b', 'c\u2028d', 'def f():\n']
    for name,data,why in (('e.txt', b'\n', 'no prompt'), ('u.txt', b'ok\xff', 'byte 2'), ('j.jsonl', b'"a"\n{', 'line 2'), ('k.jsonl', b'{"x": 1}', 'line 1'), ('deep.jsonl', b'['*100000, 'line 1')):
        (tmp_path/name).write_bytes(data)
        with pytest.raises(UserError, match=why): V.read_prompts(tmp_path/name)
    with pytest.raises(UserError, match='nowhere'): V.read_prompts(tmp_path/'nowhere.txt')

def test_picture(models, tok, tmp_path):
    m, d = models['gqa']
    r = run(tok, m, d, prompts=['costs $5 and $6', 'é ☃'])
    V.picture(r, tmp_path/'v.png')
    assert (tmp_path/'v.png').read_bytes().startswith(b'\x89PNG') and [p.name for p in tmp_path.iterdir()] == ['v.png']


# ---- engines in processes of their own ----------------------------------------------------------------------------------

EVIL = r'''
import json, os, signal, subprocess, sys, time
name, take, give = sys.argv[1], *map(int, sys.argv[2:])
how, mark = os.environ['EVIL'], os.environ['MARK']
print('loading', flush=True)
say = lambda b: os.write(give, b)
if how == 'exit': sys.exit('no such \x1b[31mbackend\x1b[0m')
for line in os.fdopen(take, 'rb'):
    q = json.loads(line)
    if how == 'refuse': say(b'{"error": "ValueError: no such tensor"}\n'); continue
    if q['op'] == 'load': say(b'{"result": "1"}\n'); continue
    if how == 'noise':
        for i in range(200): print('x'*10000, flush=True); print('y'*10000, file=sys.stderr, flush=True)
        say(b'{"result": [1, 2]}\n')
    if how == 'segv': print('about to go', flush=True); os.kill(os.getpid(), signal.SIGSEGV)
    if how == 'garbage': say(b'\xff\x00 hello\n')
    if how == 'list': say(b'[1]\n')
    if how == 'neither': say(b'{"x": 1}\n')
    if how == 'shape': say(b'{"result": [9, 9], "bytes": 3}\n')
    if how == 'flood': # never a line, never an end
        while True: say(b'{"result": [' + b'1, '*20000)
    if how == 'stdin': say(json.dumps(dict(result=list(sys.stdin.buffer.read()))).encode()+b'\n')
    if how == 'error': say(b'{"error": "ValueError: no"}\n')
    if how == 'half': say(b'{"result": [9, 9], "bytes": 324}\n' + bytes(10)); os._exit(3)
    if how == 'hang':
        subprocess.Popen([sys.executable, '-c', f"import time, os\nopen({mark!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"])
        if 'LOST' in os.environ: subprocess.Popen([sys.executable, os.environ['LOST'], mark])
        while not os.path.exists(mark) or not open(mark).read(): time.sleep(.02)
        signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)
'''

@pytest.fixture
def evil(tmp_path, monkeypatch):
    (tmp_path/'evil.py').write_text(EVIL)
    monkeypatch.setattr(P, '_engines_file', lambda: str(tmp_path/'evil.py'))
    monkeypatch.setenv('MARK', str(tmp_path/'mark'))
    made = []
    def make(how, timeout=20., **kw):
        monkeypatch.setenv('EVIL', how)
        made.append(P.Remote('transformers-f32', timeout=timeout, **kw)); return made[-1]
    yield make
    for e in made: e.close()

def gone(pid):
    "Within a moment"
    for _ in range(100):
        try: os.kill(pid, 0)
        except ProcessLookupError: return True
        if Path(f'/proc/{pid}/stat').exists() and Path(f'/proc/{pid}/stat').read_text().rsplit(')', 1)[1].split()[0] == 'Z': return True
        time.sleep(.05)

@pytest.mark.parametrize('how,why', [('exit', r'died during load \(exit status 1\); its last words: no such backend'), ('segv', r'SIGSEGV\); its last words: about to go'),
    ('garbage', 'what is not an answer'), ('list', 'what is not an answer'), ('neither', 'what is not an answer'), ('shape', 'what is not an answer'), ('flood', 'what is not an answer|no answer to tokens within'), ('error', 'ValueError: no'), ('half', 'exit status 3'), ('hang', r'no answer to tokens within 2 s; killed')])
def test_what_an_engine_may_do(evil, tmp_path, how, why):
    e = evil(how, timeout=2. if how == 'hang' else 20.)
    with pytest.raises(P.EngineError, match=why) as x: e.load(tmp_path); e.tokens([1], 2)
    assert '\n' not in str(x.value)
    if how != 'error': assert e.p is None and not Path(e.scratch).exists() # its directory goes with it
    if how == 'hang': assert gone(int((tmp_path/'mark').read_text())) # and so does the child it started

def test_there_is_nothing_on_stdin(evil, tmp_path):
    e = evil('stdin')
    e.load(tmp_path)
    assert e.tokens([1], 2) == []

def test_noise_is_no_answer(evil, tmp_path):
    e = evil('noise')
    e.load(tmp_path)
    assert [e.tokens([1], 2) for _ in range(3)] == [[1, 2]]*3
    assert len(b''.join(e.words)) < 1<<20 # 12 MB were printed

def test_a_long_request_and_a_deaf_engine(evil, tmp_path):
    e = evil('hang', timeout=2.)
    e.load(tmp_path)
    with pytest.raises(P.EngineError, match='no answer'): e.tokens(list(range(100_000)), 2)

def test_every_way_to_fail_is_an_outcome(models, tok, evil):
    m, d = models['gqa']
    for how in ('exit', 'segv', 'garbage'):
        r = run(tok, m, d, engines=[evil(how)], max_tokens=2)
        o, = r.engines
        assert (r.ok, o.verdict, o.loaded) == (False, 'structural', how != 'exit') and V.show(r) and json.dumps(r.to_dict(), allow_nan=False)

LOST = r'''
import os, sys, time
if os.fork(): time.sleep(600)
os.setsid()
if os.fork(): os._exit(0)
open(sys.argv[1]+'.daemon', 'w').write(str(os.getpid())); time.sleep(600)
'''

ZYGOTE = r'''
import json, os, sys, tempfile
from xtrain import plugins as P, verify as V
from xtrain.cli import main
calls = json.loads(sys.argv[1])
V.prepare_cases(*calls[0]['argv'][1:3], max_tokens=1) # imports what all of them will need
P._engines_file = lambda: os.environ['FILE']
pids = []
for c in calls:
    pids.append(os.fork())
    if pids[-1]: continue
    os.setsid(); os.environ.update(c['env']); tempfile.tempdir = None
    log = os.open(c['log'], os.O_WRONLY | os.O_CREAT)
    for fd in (1, 2): os.dup2(log, fd)
    sys.argv[1:] = c['argv']
    main()
print(pids, flush=True)
for _ in pids:
    pid, status = os.wait()
    print([pid, os.waitstatus_to_exitcode(status)], flush=True)
'''

@pytest.fixture(scope='module')
def run_dir(tmp_path_factory):
    "A run and its export on disk, for the command line"
    from xtrain.train import make_config, train
    d = tmp_path_factory.mktemp('on disk')
    train(make_config(data='stories:300', out=str(d/'run'), steps=2, vocab_size=320, dim=32, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=8, ffn_dim=64, seq_len=48, batch_size=4, device='cpu', sample_every=0))
    from xtrain.hf import export_any
    export_any(d/'run', d/'hf')
    return d

def test_nothing_stays(tmp_path, run_dir):
    "verify is stopped, one way or another, while an engine hangs: the engine, its child, a daemon of its own and every temporary file go"
    (tmp_path/'evil.py').write_text(EVIL); (tmp_path/'lost.py').write_text(LOST)
    ways = [('engine', signal.SIGTERM, 143), ('engine', signal.SIGKILL, -9), ('engine', signal.SIGHUP, 129), ('command', signal.SIGINT, 130), ('command', signal.SIGKILL, -9)]
    calls = []
    for n,(kind,*_) in enumerate(ways):
        d = tmp_path/str(n); (d/'tmp').mkdir(parents=True)
        engine = 'transformers-f32' if kind == 'engine' else f'command:sh -c "echo $$ > \'{d}/mark\'; exec {sys.executable} \'{tmp_path}/lost.py\' \'{d}/mark\'" {{dir}} {{prompt}}'
        calls.append(dict(argv=['verify', str(run_dir/'run'), str(run_dir/'hf'), '--engine', engine], log=str(d/'log'), env=dict(MARK=str(d/'mark'), TMPDIR=str(d/'tmp'))))
    z = subprocess.Popen([sys.executable, '-c', ZYGOTE, json.dumps(calls)], stdout=subprocess.PIPE, text=True, env=os.environ | dict(EVIL='hang', OMP_NUM_THREADS='1', FILE=str(tmp_path/'evil.py'), LOST=str(tmp_path/'lost.py')))
    pids = json.loads(z.stdout.readline())
    try:
        for n,(pid,(kind,sig,code)) in enumerate(zip(pids, ways)):
            d = tmp_path/str(n)
            def wait(f): return next((int(f.read_text()) for _ in range(1200) if f.exists() and f.read_text().strip() or time.sleep(.05)), None)
            child, daemon = wait(d/'mark'), wait(d/'mark.daemon')
            assert child and daemon, (d/'log').read_text()
            os.kill(pid, sig)
            assert json.loads(z.stdout.readline()) == [pid, code]
            err = (d/'log').read_text()
            assert 'Traceback' not in err and err.count('\n') <= 2, err
            assert gone(child) and (sys.platform != 'linux' or gone(daemon)), (kind, sig)
            for _ in range(100):
                if not (left := os.listdir(d/'tmp')): break
                time.sleep(.05)
            assert left == [], (kind, sig)
    finally:
        for pid in pids:
            try: os.kill(pid, signal.SIGKILL)
            except ProcessLookupError: pass
        z.communicate(timeout=30)
    assert sorted(os.listdir(run_dir)) == ['hf', 'run'] and 'verify.png' not in os.listdir(run_dir/'run')

def test_a_checkpoint_has_its_runs_held_out_text(run_dir):
    one, = (run_dir/'run'/'checkpoints').iterdir()
    assert len(V.held_out_ids(one, 99)) == 99 and V.held_out_ids(one, 99) == V.held_out_ids(run_dir/'run', 99)
    r = V.verify(one, run_dir/'hf', PROMPTS[:1], 2, ['transformers-f32'], held_out=16)
    assert r.ok and r.held_out == '16 held-out tokens' and all(c['ok'] for c in r.checks.values())

@pytest.mark.parametrize('timeout', [1e10, 1e300, float('inf')])
def test_for_ever_is_a_time_too(timeout, evil, tmp_path):
    "More than `select` can count is no fault of the export"
    assert P.run_program(['echo', 'x'], timeout) == 'x\n'
    e = evil('noise', timeout=timeout)
    e.load(tmp_path)
    assert e.tokens([1], 2) == [1, 2]

def test_a_guard_leaves_the_living_alone(tmp_path):
    "After an orderly end nothing is killed and nothing removed"
    p = subprocess.Popen(['sleep', '60'], start_new_session=True)
    g = P.Guard(p, 'x', str(tmp_path)); g.release()
    assert g.p.returncode == 0 and p.poll() is None and tmp_path.exists()
    assert P.end_group(p) == -9

def test_which_engine(tmp_path, monkeypatch):
    names = lambda *s: [e.name for e in P.find_engines(list(s))]
    assert names('transformers') == ALL[:2] and names('llama.cpp-f32') == ['llama.cpp-f32']
    assert names('mlx-lm', 'command:prog {dir} {prompt}', 'logits-f32:dump {dir} {ids}') == ['mlx-lm-f32', 'mlx-lm-bf16', 'command:prog', 'logits-f32:dump']
    assert P.find_engines([f'mlx-lm-f32={sys.executable}'])[0].python == os.path.abspath(sys.executable)
    venv = tmp_path/'a venv'/'bin'; venv.mkdir(parents=True); (venv/'python').symlink_to(sys.executable)
    assert P.find_engines([f'mlx-lm-f32={venv.parent}'])[0].python == str(venv/'python') # the link itself: it knows its environment
    for spec,why in (('nope', "'nope'"), ('', "''"), ('mlx-lm=/nowhere', 'mlx-lm=/nowhere: there is no Python'), ('mlx-lm=', 'after the ='), ('command:', 'command'), ('command:x {dir}', 'prompt'), ('command:x {prompt}', 'dir'),
            ('command:x {dir} {prmpt}', 'prmpt'), ('command:x "{dir} {prompt}', 'quot')):
        with pytest.raises(UserError, match=why): P.find_engines([spec])
    (tmp_path/'empty'/'bin').mkdir(parents=True); (tmp_path/'empty'/'bin'/'python').write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n'); (tmp_path/'empty'/'bin'/'python').chmod(0o755)
    e, = P.find_engines([f'onnxruntime-genai={tmp_path}/empty'])
    assert e.available() == f'onnxruntime_genai is not installed for {tmp_path}/empty/bin/python; run {tmp_path}/empty/bin/python -m pip install onnxruntime-genai onnx_ir transformers torch'
    for prog,why in (('false', 'does not run as a Python: exit status 1'), ('echo', 'is no Python'), ('true', 'is no Python'), ('cat', 'does not run as a Python')):
        e, = P.find_engines([f'mlx-lm-f32={prog}'])
        assert why in e.available() and '\n' not in e.available(), prog
    (tmp_path/'slow').write_text('#!/bin/sh\nsleep 60\n'); (tmp_path/'slow').chmod(0o755)
    assert 'no end after 0.3 s' in P.find_engines([f'mlx-lm-f32={tmp_path}/slow'], .3)[0].available()
    (tmp_path/'text').write_text('hello'); (tmp_path/'text').chmod(0o755)
    assert 'exec format error' in P.find_engines([f'mlx-lm-f32={tmp_path}/text'])[0].available()

PROG = r'''
import json, os, sys, time
how, dir, prompt, n = sys.argv[1:5]
assert os.path.isdir(dir)
book = json.load(open(os.path.join(os.path.dirname(os.path.abspath(__file__)), 'book.json')))
said = book[prompt]
if how == 'text': print('\x1b[2mloading model [1/1]\x1b[0m\n>>> ' + prompt + said['text'] + '\n[40 tokens, 3.2 tokens/s]')
if how == 'bare': print('loaded in 3.5 s'); print(said['text'])
if how == 'ids': print('noise [1, 2]'); print(said['ids']); print('done')
if how == 'short': print(prompt + said['text'][:9])
if how == 'other': print(prompt + said['text'][:6] + '@@@')
if how == 'dump':
    print('12 threads, 3.5 GB\nrank  logit  id  token')
    for r,(i,v) in enumerate(said['top']): print(r, f'{v:.4f}', i, '" 1.5"')
if how == 'dump off':
    for i,v in said['top']: print(f'id={i} logit={v+i:.4f}')
if how == 'garbage': sys.stdout.buffer.write(os.urandom(5000))
if how == 'nothing': pass
if how == 'dies': print(prompt + said['text'], flush=True); os.abort()
if how == 'fails': sys.exit('cannot open the weights')
if how == 'forever':
    while True: print('x'*10000)
if how == 'hangs': print(prompt, flush=True); time.sleep(600)
'''
AWKWARD = ['Once upon a "time"', "it's $HOME `ls` $(ls)", 'two\nlines  and\ttab', 'a {dir} {x} %s \\', 'é ☃']

@pytest.fixture(scope='module')
def program(models, tok, tmp_path_factory):
    "A program that has learnt the reference's answers by heart"
    m, d = models['tied']
    ref, home = V.Reference(m, tok), tmp_path_factory.mktemp('my programs')
    book = {}
    for p in AWKWARD:
        c = ref.case(tok.encode(p), 12, p)
        book[p] = dict(text=tok.decode(c.tokens, special=False), ids=c.tokens, top=[(t['id'], t['logit']) for t in c.top])
    prepared = V.prepare_cases((m, tok), d, AWKWARD, 12)[:3]
    (home/'book.json').write_text(json.dumps(book)); (home/'pro gram.py').write_text(PROG)
    def ask(how, kind='command', timeout=60.):
        line = f"{kind}:{sys.executable} '{home}/pro gram.py' '{how}' {{dir}} {{prompt}} {{max_tokens}}"
        return V.run_engine(P.find_engines([line], timeout)[0], d, *prepared)
    return ask

@pytest.mark.parametrize('how', ['text', 'bare', 'ids'])
def test_any_program(program, how):
    "Prompts with quotes, dollars, braces and line breaks arrive as they are; the answer is found among the noise"
    o = program(how, 'command-f32')
    assert (o.verdict, o.forks, len(o.tokens)) == ('identical', [], 5) and o.logprob is None, o.reasons

def test_any_program_that_shows_logits(program):
    o = program('dump', 'logits-f32')
    assert o.verdict == 'identical' and o.logprob < 1e-4 and o.tokens == []
    o = program('dump off', 'logits')
    assert o.verdict == 'structural' and 'log-probability' in ' '.join(o.reasons)

@pytest.mark.parametrize('how,why', [('short', r'forks at token \d+: it ended'), ('other', 'forks at token'), ('garbage', r'forks at token \d+: '), ('nothing', 'printed nothing'), ('dies', 'SIGABRT'),
    ('fails', 'exit status 1: cannot open the weights'), ('forever', 'more than'), ('hangs', 'no end after 1 s')])
def test_a_program_that_does_not(program, how, why):
    start = time.monotonic()
    o = program(how, timeout=1. if how == 'hangs' else 60.)
    assert o.verdict == 'structural' and re.search(why, o.reasons[0]) and '\n' not in o.reasons[0] and 'inf' not in o.reasons[0] and time.monotonic()-start < 30

def test_a_prompt_no_program_can_be_given(models, tok):
    m, d = models['gqa']
    o = V.run_engine(P.find_engines(['command:cat {dir} {prompt}'])[0], d, *V.prepare_cases((m, tok), d, ['a\0b'], 2)[:3])
    assert o.verdict == 'not run' and 'null byte' in o.reasons[0]

def test_a_dump_that_is_none(program):
    for how in ('nothing', 'bare'): assert program(how, 'logits').reasons == ['printed no logits']

def test_reading_text():
    "Only the whole continuation, where it belongs, is identical"
    decode = lambda ids: ''.join(chr(i) for i in ids)
    flat = lambda k: torch.arange(128).float()
    want = [ord(c) for c in ' one two']
    read = lambda out, ended=False: V.read_text(out, 'Day', want + [0]*ended, decode, flat, ended)
    for out in ('Day one two', 'Day\nDay one two three', 'x\n one two', '> Day one two\n', 'Day nope\nDay one two'): assert read(out) == want, out
    assert read('Day one') == want[:4] and read('Day one\nstats: 3') != want
    assert read('Day one tvo')[:6] == want[:6] and read('Day one tvo')[6] == ord('v')
    assert read('Day one two', ended=True) == want + [0] and read('Day one two\n3 tokens/s', ended=True) == want + [0]
    assert read('Day one two and on', ended=True)[:8] == want and read('Day one two and on', ended=True)[8] != 0 # it should have ended
    with pytest.raises(P.EngineError): read(' \n')
    assert P.printed_ids('[1, 2') is None and P.printed_ids('[]') == [] and P.printed_ids('5, 6', bare=True) == [5, 6]
    assert P.printed_logits('took 1.5 s\nversion 1.2.3') == {} # no id, no logit

def test_line_ends_of_a_prompt(models, tok):
    "A prompt with CR LF in it is found in what a program prints, as it is and as a terminal would change it"
    want, decode = tok.encode(' a\r\nwarm stone'), lambda ids: tok.decode(ids, special=False)
    for said in ('One\r\n\tday a\r\nwarm stone and', 'One\n\tday a\nwarm stone and'):
        k = len(want) if '\r' in said else len(tok.encode(' a'))
        assert P.read_text(said, 'One\r\n\tday', want, decode, lambda k: torch.zeros(tok.vocab_size), False)[:k] == want[:k]
    m, d = models['gqa']
    line = f'command-f32:{shlex.quote(sys.executable)} -m xtrain generate {{dir}} --prompt {{prompt}} --max-tokens {{max_tokens}}'
    r = run(tok, m, d, prompts=['The\r\n\tlittle'], max_tokens=6, engines=[line])
    assert r.verdict == 'identical', V.show(r)

def test_our_own_commands_are_programs_too(models, tok):
    "`xtrain logits` prints a probability beside each logit"
    from xtrain.generate import logits_table, show_table
    m, d = models['gqa']
    rows = logits_table(m, tok, 'Once upon a time', 11)
    got = P.printed_logits(show_table(rows))
    assert [*got] == [r['id'] for r in rows] and list(got.values()) == [round(r['logit'], 4) for r in rows]

@pytest.fixture
def xserv(tmp_path, monkeypatch):
    "The specification's two programs on the PATH; tests/xserv.py plays them, in numpy alone"
    (tmp_path/'bin').mkdir()
    for name in ('xserv-cli', 'dump-logits'):
        (f := tmp_path/'bin'/name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(Path(__file__).with_name("xserv.py")))} {name} "$@"\n')
        f.chmod(0o755)
    monkeypatch.setenv('PATH', f'{tmp_path/"bin"}:{os.environ["PATH"]}')

def test_the_specifications_programs(models, xserv, tmp_path):
    "The lines that the help documents, as they stand there: a sound export is answered with the reference's words, a wrong one is found out"
    from click.testing import CliRunner
    from xtrain.cli import main
    def xtrain(*args): return CliRunner().invoke(main, ['verify', *map(str, args)])
    lines = re.findall(r"--engine '((?:command|logits):.*)'", xtrain('--help').output)
    assert lines == ['command:xserv-cli {dir} {prompt} --max-tokens {max_tokens}', 'logits:dump-logits {dir} {prompt}']
    lines += [f'{kind}-f32:{line} --f32' for kind,_,line in (l.partition(':') for l in lines)]
    shutil.copytree(models['gqa'][1], tmp_path/'hf')
    def ask(dir, prompts='42'):
        (tmp_path/'p.txt').write_text(prompts)
        r = xtrain(tmp_path/'hf', dir, '--prompts', tmp_path/'p.txt', '--max-tokens', 20, '--picture', tmp_path/'v.png', '--json', *(a for l in lines for a in ('--engine', l)))
        return r.exit_code, json.loads(r.stdout)['engines']
    code, (cli, dump, cli32, dump32) = ask(tmp_path/'hf', 'Once upon a time\nThe "little" $cat')
    assert code == 0 and [e['verdict'] for e in (dump, cli32, dump32)] == ['identical']*3 and cli['verdict'] in ('identical', 'near-tie')
    assert len(cli32['tokens']) == 2 and cli32['forks'] == [] and dump32['logprob'] < 1e-4 < dump['logprob'] <= dump['logprob_bound'] # four decimals are printed
    S.plant(tmp_path/'hf', tmp_path/'bad', 'KV heads tiled')
    code, engines = ask(tmp_path/'bad')
    assert code == 1 and [e['verdict'] for e in engines] == ['structural']*4
    S.plant(tmp_path/'hf', tmp_path/'short', 'q_norm dropped')
    code, engines = ask(tmp_path/'short')
    assert code == 1 and all(e['verdict'] == 'structural' and 'q_norm' in e['reasons'][0] for e in engines) # its own last words

def test_greedy_and_nothing_else(models, tok, tmp_path):
    "What a directory asks of a sampler is nobody's business here"
    m, d = models['gqa']
    shutil.copytree(d, tmp_path/'hf')
    g = json.loads((d/'generation_config.json').read_text())
    asks = dict(do_sample=True, temperature=.6, top_k=20, top_p=.95, min_p=.1, repetition_penalty=1.5, no_repeat_ngram_size=2, min_new_tokens=50, max_new_tokens=3, suppress_tokens=[5])
    (tmp_path/'hf'/'generation_config.json').write_text(json.dumps(g | asks))
    r = run(tok, m, tmp_path/'hf', max_tokens=20, engines=ALL)
    assert r.ok and [r.engines[i].verdict for i in (0, 2)] == ['identical']*2, V.show(r)
    assert len({i for c in r.cases for i in zip(c.tokens, c.tokens[1:])}) < sum(len(c.tokens)-1 for c in r.cases) # they do say some pair of tokens twice

def test_model_card(models, tok, tmp_path):
    m, d = models['tied']
    r = run(tok, m, d, engines=['transformers-f32'], prompts=['a|b', 'One day'], max_tokens=4)
    assert V.write_card(r, tmp_path) is False # no card
    for text in ('mine, no marks', f'{V.MARKS[0]} half'):
        (tmp_path/'README.md').write_text(text)
        assert V.write_card(r, tmp_path) is False and (tmp_path/'README.md').read_text() == text
    (tmp_path/'README.md').write_text(f'# Title é\n{V.MARKS[0]}\n{V.MARKS[1]}\nthe end\n')
    assert V.write_card(r, tmp_path)
    one = (tmp_path/'README.md').read_text()
    assert one.startswith('# Title é\n') and one.endswith('the end\n') and '| transformers-f32' in one and 'Verdict: **identical**' in one
    r.engines[0].seconds += 9
    assert V.write_card(r, tmp_path) and (tmp_path/'README.md').read_text() == one and [p.name for p in tmp_path.iterdir()] == ['README.md']

def test_ends(models, tok):
    "An engine that only says 'ended' is believed where the reference ends, and one that goes on is not"
    m, d = models['tied']
    ref = V.Reference(m, tok)
    c = ref.case(tok.encode('One day'), 6, 'One day')
    ended = replace(c, tokens=c.tokens[:3]+[tok.eos_id])
    assert V.first_fork(ref, 0, ended, c.tokens[:3]+[E.END]) is None
    assert V.first_fork(ref, 0, c, c.tokens[:3]+[E.END]).got is None
    o = V.Outcome('x')
    V.compare_tokens(o, Fake(lambda ids, n: ended.tokens + [5, 5]), ref, [ended])
    assert o.reasons == [f'prompt 1 goes on after the end of the text (id {tok.eos_id})']

@pytest.mark.parametrize('dtype', [torch.float16, torch.float32])
def test_exports_in_other_dtypes(tok, tmp_path, dtype):
    "The reference rounds as the export did"
    m = make(tok, 'tied', seed=3)
    export_hf(m, tok, tmp_path/'hf', dtype=dtype)
    r = run(tok, m, tmp_path/'hf', engines=['transformers-f32', 'llama.cpp-f32'], max_tokens=8)
    assert r.ok and r.engines[0].bit_equal and all(c['ok'] for c in r.checks.values()), V.show(r)

@pytest.mark.parametrize('switches', [dict(qk_norm=False), dict(qk_norm=False, qkv_bias=True)], ids=['llama', 'qwen2'])
def test_other_kinds(tok, tmp_path, switches):
    from xtrain.tokenizer import as_qwen2
    if switches.get('qkv_bias'): tok = Tokenizer(as_qwen2(tok).to_str(), tok.eos_token) # transformers reads any other as this one
    m = TinyTransformer(ModelConfig(tok.vocab_size, **MODELS['tied'] | dict(max_seq_len=128) | switches), seed=0, std=.05)
    export_hf(m, tok, tmp_path/'hf')
    r = run(tok, m, tmp_path/'hf', max_tokens=8)
    assert r.ok and r.engines[0].bit_equal and all(c['ok'] for c in r.checks.values()), V.show(r)

# ---- what an engine cannot be asked ----------------------------------------------------------------------------------------

def test_a_tokenizer_that_normalises(models, tok, tmp_path):
    "No GGUF file has a normaliser: llama.cpp is asked about normalised text, and the report says so"
    from xtrain.tokenizer import as_qwen2
    m, tok = models['tied'][0], Tokenizer(as_qwen2(tok).to_str(), tok.eos_token)
    export_hf(m, tok, tmp_path/'hf')
    r = run(tok, m, tmp_path/'hf', prompts=['One day', 'cafe\u0301'], max_tokens=8, engines=['transformers-f32', 'llama.cpp-f32'])
    assert r.ok and [e.verdict for e in r.engines] == ['identical']*2, V.show(r)
    assert r.engines[0].notes == [] and r.engines[1].notes == ['prompt 2 was normalised for it: the tokenizer does that, and this engine cannot']
    assert r.engines[1].notes[0] in V.show(r)

def test_text_is_read_as_tokenizer_json_says(models, tok, tmp_path):
    "Where a prompt has the name of a special token, it is that token to every engine; to xtrain it is text. That is no fault of the export"
    m, d = models['gqa']
    r = run(tok, m, d, prompts=['The little<|endoftext|>One day'], max_tokens=4, engines=['transformers-f32', 'llama.cpp-f32'])
    assert [e.verdict for e in r.engines] == ['identical']*2 and tok.eos_id not in r.cases[0].ids, V.show(r)
    Plain = type('Plain', (V.Engine,), dict(name='plain', encode=lambda self, text: tok.encode(text)))
    V.compare_text(o := V.Outcome('plain'), Plain(), V.Reference(m, tok), r.cases)
    assert o.reasons and 'in common' in o.reasons[0]                        # who does otherwise is told where
    class Texts(V.Engine):
        name, texts = 'texts', True
        def load(self, dir): pass
        def encode(self, text): return tok.encode(text, special=True)
    o = V.run_engine(Texts(), d, V.Reference(m, tok), r.cases, [])
    assert o.verdict == 'not run' and 'takes text only' in o.reasons[0]       # it cannot be asked, which is no fault of the export

def with_bos(tok):
    d, e = json.loads(tok.json), dict(id='<|endoftext|>', type_id=0)
    d['post_processor'] = dict(type='TemplateProcessing', single=[dict(SpecialToken=e), dict(Sequence=dict(id='A', type_id=0))], pair=[dict(Sequence=dict(id='A', type_id=0)), dict(Sequence=dict(id='B', type_id=1))],
        special_tokens={'<|endoftext|>': dict(id='<|endoftext|>', ids=[0], tokens=['<|endoftext|>'])})
    return Tokenizer(json.dumps(d), tok.eos_token)

def test_a_template_with_a_bos(models, tok, tmp_path):
    "transformers is asked with it, llama.cpp without; a BOS that tokenizer.json does not know of is a fault"
    m, bos = models['gqa'][0], with_bos(tok)
    assert bos.front == [0]
    export_hf(m, bos, tmp_path/'hf')
    r = run(bos, m, tmp_path/'hf', max_tokens=4, engines=['transformers-f32', 'llama.cpp-f32'])
    assert [e.verdict for e in r.engines] == ['identical']*2, V.show(r)
    r = run(tok, m, tmp_path/'hf', max_tokens=4, engines=['transformers-f32'])
    assert r.engines[0].reasons and all('other token ids: [0, ' in w for w in r.engines[0].reasons)

def test_a_tokenizer_with_no_gguf(models, tok, tmp_path, monkeypatch):
    "That is no fault of the export: not run, and why; but who asked for that engine got no answer"
    d = json.loads(tok.json)
    d['pre_tokenizer'] = {'type': 'Sequence', 'pretokenizers': [{'type': 'Digits', 'individual_digits': False}, {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True, 'use_regex': True}]}
    m, tok = models['tied'][0], Tokenizer(json.dumps(d), tok.eos_token)
    export_hf(m, tok, tmp_path/'hf')
    r = run(tok, m, tmp_path/'hf', max_tokens=4, engines=['transformers-f32', 'llama.cpp-f32'])
    assert [e.verdict for e in r.engines] == ['identical', 'not run'] and r.verdict == 'identical' and r.asked and not r.ok
    why, = r.engines[1].reasons
    assert 'no name for how it splits text' in why and why in V.show(r) and json.loads(json.dumps(r.to_dict()))['ok'] is False
    r.asked = False # as without --engine: whatever is installed, and can
    assert r.ok
    r = run(tok, m, tmp_path/'hf', max_tokens=4, engines=['llama.cpp-f32'])
    assert r.verdict == 'not run' and not r.ok
    faults = ['wrong theta', 'another EOS', 'truncated file']
    s = S.selftest((m, tok), tmp_path/'hf', ['transformers-f32', 'llama.cpp-f32'], prompts=PROMPTS[:2], max_tokens=6, faults=faults)
    assert s.ok and [list(row) for row in s.cells.values()] == [['transformers-f32']]*3 and 'llama.cpp-f32: the sound export is not run' in S.show_selftest(s)
    assert not S.selftest((m, tok), tmp_path/'hf', ['llama.cpp-f32'], prompts=PROMPTS[:2], max_tokens=6, faults=faults).ok

def test_text_of_ones_own(models, tok, tmp_path):
    m, d = models['gqa']
    (tmp_path/'t.txt').write_text('\ufeff' + TEXTS[-1]*3)
    text = V.read_text_file(tmp_path/'t.txt')
    assert text == TEXTS[-1]*3
    r = run(tok, m, d, engines=['transformers-bf16'], max_tokens=2, text=text)
    assert r.engines[0].kl_tokens == len(tok.encode(text)) and r.held_out == f'{len(tok.encode(text)):,} held-out tokens'
    (tmp_path/'cut.txt').write_bytes('aé'.encode()*9)
    assert V.read_text_file(tmp_path/'cut.txt', 5) == 'aéa' # a character cut by the limit is left out
    (tmp_path/'torn.txt').write_bytes('aé'.encode()[:-1])
    with pytest.raises(UserError, match='byte 1'): V.read_text_file(tmp_path/'torn.txt') # one cut by whoever wrote it is not
    for name,data,why in (('e', b' \n', 'no text'), ('b', b'ok\xff', 'byte 2'), ('none', None, 'no such file')):
        if data: (tmp_path/name).write_bytes(data)
        with pytest.raises(UserError, match=why): V.read_text_file(tmp_path/name)

def test_one_process_for_two_dtypes(models, tok, monkeypatch):
    "A program is imported once; what crashes is started again; another program or Python gets its own"
    m, d = models['gqa']
    a, b = P.Remote('llama.cpp-f32'), P.Remote('llama.cpp-bf16')
    pids, load = [], P.Remote.load
    def spy(e, dir): load(e, dir); pids.append(e.p.pid)
    monkeypatch.setattr(P.Remote, 'load', spy)
    r = V.verify((m, tok), d, PROMPTS[:1], 2, [a, b], held_out=16)
    assert r.ok and len(set(pids)) == 1 and r.engines[0].logprob < r.engines[1].logprob and a.p is b.p is None and gone(pids[0])
    assert not a.shares(P.Remote('transformers-f32')) and not a.shares(P.Remote('llama.cpp-bf16', sys.executable)) and not P.Remote('vllm-f32').shares(P.Remote('vllm-bf16'))
    monkeypatch.setattr(b, 'load', lambda dir: load(b, dir)); a.p = None
    a.hand_over(b); assert b.p is None # nothing to hand over: b will start its own

def test_json_keeps_its_shape(models, tok):
    "What scripts read: the keys are a promise"
    m, d = models['gqa']
    r = run(tok, m, d, engines=['transformers-f32', 'transformers-bf16'], max_tokens=4).to_dict()
    assert set(r) == {'verdict', 'ok', 'run', 'dir', 'checks', 'held_out', 'prompts', 'engines'}
    assert set(r['checks']) == set(V.CHECKS) and all(set(c) == {'ok', 'faults', 'note'} for c in r['checks'].values()) and all(set(p) == {'text', 'ids', 'tokens'} for p in r['prompts'])
    assert all(set(e) == {'engine', 'version', 'exact', 'loaded', 'verdict', 'reasons', 'notes', 'tokens', 'forks', 'identical_up_to', 'logprob', 'logprob_bound', 'kl', 'kl_bound', 'kl_tokens', 'bit_equal', 'seconds'} for e in r['engines'])
    f = V.Outcome('x', forks=[V.Fork(0, 1, 2, 3, math.inf, 0.)])
    assert V.Report('', '', {}, [], [f], '').to_dict()['engines'][0]['forks'] == [dict(prompt=0, step=1, want=2, got=3, gap=None, bound=0., near_tie=False)]
