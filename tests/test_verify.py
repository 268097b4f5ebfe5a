"verify: sound exports pass, every planted mistake is caught by numbers alone, and nothing an engine does is a crash."
import json, math
from dataclasses import replace
import pytest, torch
from safetensors.torch import load_file, save_file
from xtrain import verify as V
from xtrain.config import ModelConfig, UserError
from xtrain.hf import export_hf
from xtrain.model import TinyTransformer
from xtrain.tokenizer import Tokenizer

TEXTS = ['Once upon a time there was a small red fox. One day the fox found a warm stone and slept on it. ']*20 + ['The little cat had a ball. She liked the ball, and the ball liked her.']*20
PROMPTS = ['Once upon a time', 'One day', 'The little', 'She liked the', 'a warm stone', 'fox', '42', 'é ☃']
MODELS = { # square projections, head_dim free of dim/heads, tied head
    'square': dict(dim=64, n_layers=3, n_heads=8, n_kv_heads=2, head_dim=8, ffn_dim=96),
    'free head_dim': dict(dim=48, n_layers=2, n_heads=6, n_kv_heads=2, head_dim=32, ffn_dim=80, rope_theta=1e6, eps=1e-5),
    'tied': dict(dim=64, n_layers=3, n_heads=8, n_kv_heads=2, head_dim=8, ffn_dim=64, tied=True),
}

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
def models(tok, tmp_path_factory):
    d = tmp_path_factory.mktemp('exports')
    out = {}
    for name in MODELS:
        m = make(tok, name)
        export_hf(m, tok, d/name)
        out[name] = m, d/name
    return out

def run(tok, model, dir, **kw): return V.verify((model, tok), dir, **dict(prompts=PROMPTS[:3], max_tokens=12) | kw)


@pytest.mark.parametrize('name', MODELS)
def test_sound_export(models, tok, name):
    m, d = models[name]
    r = run(tok, m, d, prompts=PROMPTS, max_tokens=32)
    f32, bf16 = r.engines
    assert r.ok and all(c['ok'] for c in r.checks.values())
    assert (f32.verdict, f32.bit_equal, f32.forks, f32.logprob, f32.kl) == ('identical', True, [], 0., 0.)
    assert f32.tokens == [c.tokens for c in r.cases]
    assert bf16.verdict in ('identical', 'near-tie') and bf16.bit_equal # the composed path has transformers' bits in bfloat16 too
    assert 0 < bf16.logprob <= bf16.logprob_bound and 0 < bf16.kl <= bf16.kl_bound
    assert all(f.near_tie for f in bf16.forks)

PLANTED = [n for n in V.CORRUPTIONS if n != 'prefixed names']

@pytest.mark.parametrize('name', ['square', 'tied'])
@pytest.mark.parametrize('planted', PLANTED)
def test_planted_mistakes_are_seen_by_numbers_alone(models, tok, tmp_path, name, planted):
    m, d = models[name]
    assert V.plant(d, tmp_path/'bad', planted)
    r = run(tok, m, tmp_path/'bad', checks=()) # no look at config.json, names or bytes
    f32, bf16 = r.engines
    assert not r.ok and f32.verdict == 'structural' and f32.bit_equal is False and bf16.bit_equal is False
    assert 'bit for bit' in f32.notes[0] and 'bit for bit' in bf16.notes[0]
    assert f32.logprob > 10*f32.logprob_bound and f32.kl > 10*f32.kl_bound
    if planted == 'wrong eps': assert bf16.verdict != 'structural' # smaller than bfloat16's own rounding
    else: assert bf16.verdict == 'structural' and bf16.kl > bf16.kl_bound

def test_tokens_alone_would_not_do(models, tok, tmp_path):
    "On a tied model several mistakes change no token at all"
    m, d = models['tied']
    silent = []
    for planted in ('q_norm set to ones', 'wrong theta', 'wrong eps'):
        V.plant(d, tmp_path/planted, planted)
        r = run(tok, m, tmp_path/planted, checks=(), engines=['transformers-f32'])
        if not r.engines[0].forks: silent.append(planted)
        assert not r.ok
    assert silent == ['q_norm set to ones', 'wrong theta', 'wrong eps']

@pytest.mark.parametrize('planted', ['wrong theta', 'wrong eps'])
def test_config_is_compared_field_by_field(models, tok, tmp_path, planted):
    m, d = models['square']
    V.plant(d, tmp_path/'bad', planted)
    field = {'wrong theta': 'rope_theta', 'wrong eps': 'rms_norm_eps'}[planted]
    assert field in V.config_faults(m.cfg, tok, tmp_path/'bad')[0]
    assert V.config_faults(m.cfg, tok, d) == []

FIELDS = dict(vocab_size=1, hidden_size=1, intermediate_size=1, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=1,
    rope_theta=5., rms_norm_eps=1., tie_word_embeddings=True, max_position_embeddings=1, eos_token_id=7, attention_bias=True, rope_scaling={}, use_sliding_window=True)

@pytest.mark.parametrize('field', FIELDS)
@pytest.mark.parametrize('how', ['changed', 'missing'])
def test_every_field_counts(models, tok, tmp_path, field, how):
    m, d = models['square']
    for f in d.iterdir(): (tmp_path/f.name).write_bytes(f.read_bytes())
    c = json.loads((d/'config.json').read_text())
    if how == 'changed': c[field] = FIELDS[field]
    else: del c[field]
    (tmp_path/'config.json').write_text(json.dumps(c))
    assert any(field in f for f in V.config_faults(m.cfg, tok, tmp_path))

@pytest.mark.parametrize('file,key', [('generation_config.json', 'eos_token_id'), ('tokenizer_config.json', 'eos_token')])
def test_all_files_name_the_same_eos(models, tok, tmp_path, file, key):
    m, d = models['square']
    for f in d.iterdir(): (tmp_path/f.name).write_bytes(f.read_bytes())
    c = json.loads((d/file).read_text())
    for v in (None, 5 if key.endswith('id') else 'a'):
        (tmp_path/file).write_text(json.dumps(c | {key: v}))
        assert [f for f in V.config_faults(m.cfg, tok, tmp_path) if file in f and key in f]
    if file == 'tokenizer_config.json': return
    r = run(tok, m, tmp_path, engines=['transformers-f32'], max_tokens=2)
    assert r.engines[0].verdict == 'identical' and r.verdict == 'structural' # a field is enough

def test_tensor_headers(models, tok, tmp_path):
    m, d = models['square']
    assert V.tensor_faults(m.cfg, d) == []
    assert any('blocks' not in f and 'k_proj' in f and 'shape' in f for f in V.tensor_faults(replace(m.cfg, n_kv_heads=4), d))
    assert V.tensor_faults(replace(m.cfg, tied=True), d) == ['lm_head.weight is not a tensor of this model']
    for f in d.iterdir(): (tmp_path/f.name).write_bytes(f.read_bytes())
    t = load_file(d/'model.safetensors')
    t['model.norm.weight'] = t['model.norm.weight'].float()
    save_file(t, tmp_path/'model.safetensors', {'format':'pt'})
    assert V.tensor_faults(m.cfg, tmp_path) == ['model.norm.weight is F32, torch_dtype says BF16']

def test_prefixed_names_are_not_loaded_in_silence(models, tok, tmp_path):
    m, d = models['square']
    V.plant(d, tmp_path/'bad', 'prefixed names')
    r = run(tok, m, tmp_path/'bad', checks=())
    assert {e.verdict for e in r.engines} == {'structural'} and 'missing keys' in r.engines[0].reasons[0]

def test_weights_of_another_checkpoint(models, tok):
    "The check names the tensors"
    m, d = models['square']
    other = make(tok, 'square')
    with torch.no_grad(): other.blocks[1].wq.add_(.01)
    r = run(tok, other, d, engines=['transformers-f32'], max_tokens=2)
    assert r.checks['weights']['faults'] == ['blocks.1.wq is not what the run has'] and r.verdict == 'structural'

def test_another_tokenizer(models, tok, tmp_path):
    "Same ids, other text: the file and what AutoTokenizer makes of it are both compared"
    m, d = models['square']
    for f in d.iterdir(): (tmp_path/f.name).write_bytes(f.read_bytes())
    Tokenizer.train(TEXTS[::-1], 290).save(tmp_path/'tokenizer.json')
    r = run(tok, m, tmp_path, engines=['transformers-f32'], max_tokens=2)
    assert not r.checks['tokenizer']['ok'] and any('other token ids' in w for w in r.engines[0].reasons)

def test_padded_vocabulary(tok, tmp_path):
    "Rows beyond the tokenizer may win on both sides alike"
    m = make(tok, 'square', rows=9)
    with torch.no_grad(): m.lm_head[:, -3:].mul_(8)
    export_hf(m, tok, tmp_path/'hf')
    r = run(tok, m, tmp_path/'hf', max_tokens=30)
    assert r.ok and max(max(c.tokens) for c in r.cases) >= tok.vocab_size

def test_eos(tok, tmp_path):
    "A text that ends is compared up to and with its EOS, id 0 like any other"
    assert tok.eos_id == 0
    m = make(tok, 'square')
    said = V.Reference(m, tok).tokens(tok.encode(PROMPTS[0]), 6)[-1]
    with torch.no_grad(): m.lm_head[:, 0] = m.lm_head[:, said]*1.02 # whoever was about to say that, ends
    export_hf(m, tok, tmp_path/'hf')
    r = run(tok, m, tmp_path/'hf', prompts=PROMPTS, max_tokens=20)
    ended = [c.tokens for c in r.cases if 0 in c.tokens]
    assert r.ok and ended and all(t.index(0) == len(t)-1 for t in ended)
    c, ref = next(c for c in r.cases if 0 in c.tokens), V.Reference(m, tok)
    assert V.first_fork(ref, 0, c, c.tokens + [5, 5]) is None # what comes after the EOS is nobody's business
    assert V.first_fork(ref, 0, c, c.tokens[:-1]).got is None # but it has to come


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

class Fake(V.Engine):
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
    m, d = models['square']
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
    assert beyond.verdict == 'structural'

def test_a_near_tie_excuses_bfloat16_only(models, tok, plug):
    m, d = models['square']
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
    m, d = models['square']
    def crash(ids, n): raise RuntimeError('no kernel\nsecond line')
    r = run(tok, m, d, engines=plug(Fake(crash)))
    assert r.verdict == 'structural' and r.engines[0].reasons == ['RuntimeError: no kernel']
    assert 'no kernel' in V.show(r)

def test_an_engine_that_is_not_there(models, tok, plug):
    m, d = models['square']
    e = Fake(None); e.available = lambda: 'fake is not installed; pip install fake'
    with pytest.raises(UserError, match='pip install fake'): run(tok, m, d, engines=plug(e))
    with pytest.raises(UserError, match="no engine called 'nope'"): run(tok, m, d, engines=['nope'])
    assert V.run_engine(e, d, None, [], []).verdict == 'not run'

def test_nan_is_structural(models, tok, plug):
    m, d = models['square']
    ref = V.Reference(m, tok)
    e = Fake(ref.tokens)
    e.logits = lambda ids: torch.full((len(ids), m.cfg.vocab_size), math.nan)
    r = run(tok, m, d, engines=plug(e))
    assert r.verdict == 'structural' and len(r.engines[0].reasons) == 2
    json.dumps(r.to_dict(), allow_nan=False)

def test_leaves_no_trace_in_transformers(models, tok):
    import transformers.utils.logging as log
    before = log.get_verbosity(), log.is_progress_bar_enabled()
    run(tok, *models['square'], max_tokens=1)
    assert (log.get_verbosity(), log.is_progress_bar_enabled()) == before

def test_reference_leaves_the_model_alone(tok):
    m = make(tok, 'tied')
    before = {n: p.clone() for n,p in m.params().items()}
    V.Reference(m, tok)
    assert all(torch.equal(p, before[n]) and p.dtype == torch.float32 and p.requires_grad for n,p in m.params().items())

@pytest.mark.parametrize('kind', ['nothing', 'file', 'pickle', 'cut', 'no config'])
def test_refusals(models, tok, tmp_path, kind):
    m, d = models['square']
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
    m, d = models['square']
    for text,why in (('', 'no tokens'), ('fox '*200, '128')):
        with pytest.raises(UserError, match=why): run(tok, m, d, prompts=[text])
    long = tok.decode(tok.encode('fox '*200)[:120]) # fewer new tokens than asked for, where the context ends
    r = run(tok, m, d, prompts=[long], max_tokens=40)
    assert r.ok and len(r.cases[0].tokens) == 128-len(r.cases[0].ids)
    (tmp_path/'p.txt').write_bytes('\ufeffOne day\n\n  \nThe é\r\n'.encode())
    assert V.read_prompts(tmp_path/'p.txt') == ['One day', 'The é']
    (tmp_path/'p.jsonl').write_text('"a"\n{"prompt": "b"}\n{"text": "c"}\n')
    assert V.read_prompts(tmp_path/'p.jsonl') == ['a', 'b', 'c']
    for name,data,why in (('e.txt', b'\n', 'no prompt'), ('u.txt', b'ok\xff', 'byte 2'), ('j.jsonl', b'"a"\n{', 'line 2'), ('k.jsonl', b'{"x": 1}', 'line 1')):
        (tmp_path/name).write_bytes(data)
        with pytest.raises(UserError, match=why): V.read_prompts(tmp_path/name)
    with pytest.raises(UserError, match='nowhere'): V.read_prompts(tmp_path/'nowhere.txt')

def test_picture(models, tok, tmp_path):
    m, d = models['square']
    r = run(tok, m, d, prompts=['costs $5 and $6', 'é ☃'])
    V.picture(r, tmp_path/'v.png')
    assert (tmp_path/'v.png').read_bytes().startswith(b'\x89PNG') and [p.name for p in tmp_path.iterdir()] == ['v.png']
