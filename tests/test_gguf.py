"GGUF: what was written is what llama.cpp reads, tokenises and computes"
import json, os, random, signal, subprocess, sys, time, unicodedata
from pathlib import Path
import numpy as np, pytest, torch
from hypothesis import given, settings, strategies as st
from hard import KINDS, Llama, hard, made_raw
gguf = pytest.importorskip('gguf')
pytest.importorskip('xllamacpp')
from xtrain.config import ModelConfig, UserError
from xtrain.generate import generate
from xtrain.gguf import LOOKS_LIKE_END, export_gguf, gguf_name, interleave, q8_0_bound
from xtrain.hf import export_hf
from xtrain.model import TinyTransformer
from xtrain.stories import Stories
from xtrain.tokenizer import Tokenizer, pre_name

BASE = dict(dim=64, n_layers=2, n_heads=8, n_kv_heads=2, head_dim=32, ffn_dim=128, max_seq_len=128)
MODELS = {'8 heads on 2, wide': {}, 'head_dim not dim/heads, narrow': dict(n_heads=3, n_kv_heads=1, head_dim=12, dim=96), 'tied': dict(tied=True, rope_theta=1e6, eps=1e-5),
          'llama': dict(qk_norm=False, head_dim=8), 'llama, wide': dict(qk_norm=False), 'qwen2': dict(qk_norm=False, qkv_bias=True, head_dim=8), 'qwen2, wide': dict(qk_norm=False, qkv_bias=True, tied=True)}

@pytest.fixture(scope='module')
def tok(): return Tokenizer.train((Stories(1).story(i).text for i in range(200)), 500)

def trained(tok, **change):
    "A few steps of training, enough for a model to have an opinion"
    m = TinyTransformer(ModelConfig(vocab_size=504, **(BASE | change)), seed=0)
    ids = [i for t in tok.encode_batch([Stories(1).story(i).text for i in range(200)]) for i in [*t, 0]]
    opt, data = torch.optim.AdamW(m.parameters(), lr=5e-3), torch.tensor(ids[:len(ids)//65*65]).view(-1, 65)
    for i in range(40):
        b = data[i*8%len(data):][:8]
        m.loss(b[:, :-1], b[:, 1:]).backward(); opt.step(); opt.zero_grad()
    return m.requires_grad_(False)

@pytest.fixture(scope='module')
def model(tok): return trained(tok)

def written(tmp_path, source, dtype='F32', **kw): return Path(export_gguf(source, tmp_path/f'{dtype}.gguf', dtype, **kw)['path'])

def keys(file):
    r = gguf.GGUFReader(file)
    return {k: f.contents() for k,f in r.fields.items() if not k.startswith('GGUF.')}, {t.name: t for t in r.tensors}

# What it computes

@pytest.mark.parametrize('name', MODELS)
def test_greedy_tokens_are_ours(tok, tmp_path, name):
    m = trained(tok, **MODELS[name])
    llama = Llama(written(tmp_path, (m, tok)))
    prompts = [tok.encode(Stories(7).story(i).text)[:n] for i,n in enumerate((1, 2, 3, 5, 8, 13, 30, 60))]
    for ids in prompts: assert llama.greedy(ids, 48) == generate(m, [ids], 48, eos_id=0)[0]

def test_other_types_are_near(tok, model, tmp_path):
    ids = tok.encode('Once there was a shy otter.')
    want = model(torch.tensor([ids]))[0, -1].double().log_softmax(-1)
    for dtype,tol in (('F32', 2e-4), ('F16', 5e-3), ('BF16', 5e-2), ('Q8_0', 5e-2)):
        r = Llama(written(tmp_path, (model, tok), dtype)).complete(ids, 1, n_probs=100)['completion_probabilities'][0]['top_logprobs']
        assert max(abs(x['logprob'] - want[x['id']].item()) for x in r) < tol, dtype

def test_an_unpermuted_llama_is_seen(tok, tmp_path, monkeypatch):
    m = trained(tok, **MODELS['llama'])
    ids = tok.encode('Once there was a shy otter.')
    want = m(torch.tensor([ids]))[0, -1].double().log_softmax(-1)
    def error():
        r = Llama(written(tmp_path, (m, tok), overwrite=True)).complete(ids, 1, n_probs=100)['completion_probabilities'][0]['top_logprobs']
        return max(abs(x['logprob'] - want[x['id']].item()) for x in r)
    right = error()
    monkeypatch.setattr('xtrain.gguf.interleave', lambda w, d: w)
    assert right < 2e-4 and error() > 50*right

# What it holds

def test_numbers_are_the_models_own(tok, model, tmp_path):
    for dtype,bits in (('F32', torch.float32), ('BF16', torch.bfloat16), ('F16', torch.float16)):
        _, tensors = keys(written(tmp_path, (model, tok), dtype))
        assert len(tensors) == len(model.params())
        for n,p in model.params().items():
            t, want = tensors[gguf_name(n)], p if p.ndim == 1 or n == 'embed' else p.t()
            assert t.tensor_type.name == ('F32' if p.ndim == 1 else dtype) and t.data_offset % 32 == 0
            want = (want if p.ndim == 1 else want.to(bits)).contiguous()
            assert t.data.tobytes() == want.view(torch.uint8).numpy().tobytes(), n

def test_keys(tok, model, tmp_path):
    k, _ = keys(written(tmp_path, (model, tok)))
    assert {n.split('.', 1)[1]: v for n,v in k.items() if n.startswith('qwen3.')} == {'context_length': 128, 'embedding_length': 64, 'block_count': 2, 'feed_forward_length': 128, 'attention.head_count': 8,
        'attention.head_count_kv': 2, 'attention.key_length': 32, 'attention.value_length': 32, 'attention.layer_norm_rms_epsilon': np.float32(1e-6), 'rope.dimension_count': 32, 'rope.freq_base': 10000., 'vocab_size': 504}
    assert {n.split('.')[-1]: v for n,v in k.items() if n.startswith('tokenizer.') and not isinstance(v, list)} == dict(model='gpt2', pre='qwen2', eos_token_id=0, bos_token_id=0, add_bos_token=False, add_eos_token=False)
    assert len(k['tokenizer.ggml.tokens']) == len(k['tokenizer.ggml.token_type']) == 504

def test_a_chat_template_goes_along(tok, model, tmp_path):
    tok.chat_template = '{{ messages[0].content }}'
    try: k, _ = keys(written(tmp_path, (model, tok)))
    finally: tok.chat_template = None
    assert k['tokenizer.chat_template'] == '{{ messages[0].content }}'

@pytest.mark.parametrize('template, left_out', [('{% for', True), ('{{ x', True), ('{% generation %}{{ messages }}{% endgeneration %}', False), ('{% for m in messages %}{% break %}{% endfor %}', False)])
def test_a_template_that_is_none_is_left_out(tok, model, tmp_path, monkeypatch, template, left_out):
    "The server of llama.cpp would not start with it"
    monkeypatch.setattr(tok, 'chat_template', template)
    r = export_gguf((model, tok), tmp_path/'F32.gguf', 'F32')
    assert ('tokenizer.chat_template' not in keys(tmp_path/'F32.gguf')[0]) == left_out == any('no valid Jinja' in n for n in r['notes'])
    assert Llama(tmp_path/'F32.gguf').encode('a')

def test_same_bytes_from_anywhere(tok, model, tmp_path):
    from xtrain.checkpoint import new_run
    from xtrain.hf import open_weights
    export_hf(model, tok, tmp_path/'dir', max_shard_size='100KB', dtype=torch.float32)
    w = open_weights(tmp_path/'dir')
    new_run(tmp_path/'run', w.cfg, w.get, tok)
    for kind in ('F32', 'Q8_0'):
        a = [Path(export_gguf(s, tmp_path/f'{i}.gguf', kind, overwrite=True)['path']).read_bytes() for i,s in enumerate([(model, tok), tmp_path/'dir', str(tmp_path/'run'), (model, tok)])]
        assert len(set(a)) == 1

@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-1, 1, width=32), min_size=32, max_size=32), st.integers(-140, 10))
def test_q8_0_bound(x, e):
    x = np.array([x], 'f4')
    if (top := np.abs(x).max()) > 0: x *= np.float32(2.)**e/top
    with np.errstate(all='ignore'): y = gguf.dequantize(gguf.quantize(x, gguf.GGMLQuantizationType.Q8_0), gguf.GGMLQuantizationType.Q8_0)
    assert (np.abs(x.astype('f8') - y) <= q8_0_bound(x)).all()

@pytest.mark.filterwarnings('error')
def test_numbers_too_small_for_a_scale_are_zeros_everywhere(tok, tmp_path):
    "1/d overflows below 1e-38, and what a processor makes of an infinite int8 is its own affair"
    m = TinyTransformer(ModelConfig(vocab_size=504, **BASE), seed=0)
    with torch.no_grad(): m.params()['blocks.0.wv'].fill_(1e-39)
    _, t = keys(written(tmp_path, (m, tok), 'Q8_0'))
    assert not t['blk.0.attn_v.weight'].data.any()

def test_rows_that_are_no_blocks(tok, tmp_path):
    m = TinyTransformer(ModelConfig(vocab_size=504, **(BASE | dict(dim=48))), seed=0)
    r = export_gguf((m, tok), tmp_path/'a.gguf', 'Q8_0')
    assert any('no multiple of 32' in n for n in r['notes'])
    _, t = keys(tmp_path/'a.gguf')
    assert (t['blk.0.attn_q.weight'].tensor_type.name, t['blk.0.attn_output.weight'].tensor_type.name) == ('F32', 'Q8_0')
    Llama(tmp_path/'a.gguf').greedy([1, 2], 4)

# How it reads text

def make(name):
    raw, eos, pre = made_raw(name), *KINDS[name][1:]
    return Tokenizer(raw.to_str(), eos), raw, pre

def tiny(tok): return TinyTransformer(ModelConfig(tok.vocab_size + 3, 32, 1, 1, 1, 32, 32, 64), seed=0)

@pytest.mark.parametrize('name', [k for k,v in KINDS.items() if v[2]])
def test_text_is_read_as_tokenizer_json_says(tmp_path, name):
    t, raw, pre = make(name)
    r = export_gguf((tiny(t), t), tmp_path/'a.gguf')
    assert pre_name(t) == pre == r['pre'] and any('in front of every text' in n for n in r['notes']) == bool(t.front)
    llama = Llama(tmp_path/'a.gguf')
    for s in hard():
        raw.encode_special_tokens = False                                       # names of control tokens are tokens
        assert llama.encode(s, special=True) == raw.encode(s).ids, s
        raw.encode_special_tokens = True                                        # names of control tokens are text
        assert llama.encode(s) == raw.encode(s).ids, s
        if not raw.get_added_tokens_decoder().keys() - t.special_ids and not t.front: assert llama.encode(s) == t.encode(s), s

@pytest.mark.parametrize('name,why', [('qwen2', r"normalises text \(NFC\).*'e\\u0301'.*--drop-normalizer"), ('prefix', 'no name for how it splits.*add_prefix_space'), ('llama2', 'no byte-level BPE'), ('bert', 'WordPiece'), ('unigram', 'Unigram'), ('odd', "'<|strip|>' looks at the text around it")])
def test_what_llama_cpp_would_read_otherwise_is_refused(tmp_path, name, why):
    t, *_ = make(name)
    with pytest.raises(UserError, match=f'(?s)llama.cpp would not tokenise.*{why.replace("|", "[|]")}') as e: export_gguf((tiny(t), t), tmp_path/'a.gguf')
    assert '\n' not in str(e.value) and not any(tmp_path.iterdir())

def test_a_dropped_normaliser_is_noted(tmp_path):
    t, raw, _ = make('qwen2')
    r = export_gguf((tiny(t), t), tmp_path/'a.gguf', drop_normalizer=True)
    assert r['pre'] == 'qwen2' and any('normaliser is left out' in n for n in r['notes'])
    llama = Llama(tmp_path/'a.gguf')
    for s in hard():
        if unicodedata.is_normalized('NFC', s): assert llama.encode(s, special=True) == raw.encode(s).ids, s
    assert llama.encode('e\u0301') != raw.encode('e\u0301').ids

def changed(tok, **change): return Tokenizer(json.dumps(json.loads(tok.json) | change), '<|endoftext|>')

def test_further_reasons(tok, tmp_path, monkeypatch):
    d = json.loads(tok.json)
    m, a = d['model'], d['added_tokens'][0]
    more = lambda *names: [a, *({**a, 'id': 500+i, 'content': n} for i,n in enumerate(names))]
    bytes_ = {t: i for t,i in m['vocab'].items() if t != 'ÿ'}
    for t,why in ((changed(tok, model=m | dict(ignore_merges=True)), 'ignore_merges'), (changed(tok, model=m | dict(merges=m['merges']+m['merges'][:1])), 'stands there twice'), (changed(tok, model=m | dict(vocab=bytes_)), '1 of the 256 bytes'),
                  (changed(tok, added_tokens=more('<|aa', 'aab|>')), 'can overlap'), (changed(tok, pre_tokenizer=d['pre_tokenizer']['pretokenizers'][1]), 'no name'), (changed(tok, model=m | dict(end_of_word_suffix='</w>')), 'end_of_word_suffix')):
        with pytest.raises(UserError, match=why): export_gguf((tiny(t), t), tmp_path/'a.gguf')
    for n in ('<|endoftext|>', '<MID>'):
        bare = changed(tok, added_tokens=[x for x in d['added_tokens'] if x['content'] != n], model=m | dict(vocab=m['vocab'] | {n: m['vocab'].get(n, 500)}))
        with pytest.raises(UserError, match='ordinary token'): export_gguf((tiny(bare), bare), tmp_path/'a.gguf')
        monkeypatch.setattr('xtrain.gguf.LOOKS_LIKE_CONTROL', ()) # So that it is found in text is why
        assert Llama(written(tmp_path, (tiny(bare), bare), overwrite=True)).encode(f'a {n} b', special=True) != bare.raw.encode(f'a {n} b').ids
        monkeypatch.undo()
    d['pre_tokenizer']['pretokenizers'][0]['pattern']['Regex'] += '|x'
    with pytest.raises(UserError, match='no name for how it splits'): export_gguf((tiny(tok), changed(tok, pre_tokenizer=d['pre_tokenizer'])), tmp_path/'a.gguf')

def test_overlapping_tokens_really_differ(tmp_path, monkeypatch):
    t = Tokenizer.train([], 262, special=['<|aa', 'aaab|>', '<|x|>', '<|y|>', '<|z|>'])
    monkeypatch.setattr('xtrain.gguf._overlap', lambda names: None)
    s = '<|aaab|>'
    assert Llama(written(tmp_path, (tiny(t), t))).encode(s, special=True) != t.encode(s, special=True)

def test_a_sample_of_every_character(tmp_path):
    "The edges of letters, digits, blanks and signs; what Unicode 16 brought is unknown to llama.cpp"
    t, raw, _ = make('gpt2')
    llama, rng = Llama(written(tmp_path, (tiny(t), t))), random.Random(0)
    known = [c for c in range(0x110000) if unicodedata.category(chr(c)) not in ('Cn', 'Cs') and unicodedata.unidata_version < '16']
    for _ in range(30):
        s = '\n'.join(f'a{c}\n1{c}2! {c}{c} ' for c in map(chr, rng.sample(known or [*range(32, 0x3000)], 400)))
        assert llama.encode(s, special=True) == raw.encode(s).ids

# Where a text ends

def ends(llama, i): return llama.complete([5, 6], 3, logit_bias=[[i, 1000.]])['stop_type'] == 'eos'

def test_eos_everywhere_the_same(tmp_path):
    t = Tokenizer.train([], 262, eos='<|z|>', special=['<|y|>', '<|x|>', '<|w|>', '<|v|>'])     # id 0 is an id
    for stop,want in ([], [0]), ([2], [0, 2]), ([2, 4], [0, 2, 4]):
        t.set_eos(0, stop)
        llama = Llama(written(tmp_path, (tiny(t), t), overwrite=True))
        assert [i for i in range(16) if ends(llama, i)] == want
    t.set_eos(0, [1, 2, 3])
    assert any('three ids' in n for n in export_gguf((tiny(t), t), tmp_path/'b.gguf')['notes'])

def test_no_eos_is_no_comma(tmp_path):
    t = Tokenizer.train([], 256, eos=None)
    r = export_gguf((tiny(t), t), tmp_path/'a.gguf')
    assert any('0xFF' in n for n in r['notes'])
    llama, end = Llama(tmp_path/'a.gguf'), t.vocab['ÿ']
    assert [i for i in range(256) if i < 20 and ends(llama, i)] == [] and ends(llama, end) and all(end not in t.encode(s) for s in hard())

def test_names_that_look_like_an_end(tmp_path):
    names = [n for n in LOOKS_LIKE_END if n not in ('<|endoftext|>', '[e~[')]          # of '[e~[' and '[EOT]' one can begin in the other
    t = Tokenizer.train([], 300, special=[*names, '<|user|>'])
    r = export_gguf((tiny(t), t), tmp_path/'a.gguf')
    llama = Llama(tmp_path/'a.gguf')
    assert [n for n in t.special_ids if ends(llama, n)] == [n for n in t.special_ids if n != t.vocab['<|user|>']]
    assert all(n in r['notes'][0] for n in names)

def test_a_model_that_stops_stops_everywhere(tok, tmp_path):
    "Trained to end after five tokens"
    m = TinyTransformer(ModelConfig(vocab_size=504, **BASE), seed=0)
    row = tok.encode('Once there was a shy otter')[:6]
    ids, opt = torch.tensor([row + [0]]), torch.optim.AdamW(m.parameters(), lr=1e-2)
    for _ in range(60): m.loss(ids[:, :-1], ids[:, 1:]).backward(); opt.step(); opt.zero_grad()
    got = Llama(written(tmp_path, (m, tok))).complete(row[:1], 100)
    ours = generate(m, [row[:1]], 100, eos_id=0)[0]
    assert ours == row[1:] + [0] and got['stop_type'] == 'eos' and [i for i in got['tokens'] if i] == row[1:]

# Padded vocabularies

def test_rows_without_tokens(tok, model, tmp_path):
    f = written(tmp_path, (model, tok))
    k, _ = keys(f)
    assert k['tokenizer.ggml.tokens'][500:] == ['[PAD500]', '[PAD501]', '[PAD502]', '[PAD503]'] and k['tokenizer.ggml.token_type'][500:] == [5]*4
    llama = Llama(f)
    assert llama.decode([*tok.encode('otter'), 500, 503]) == 'otter' and llama.encode('[PAD500]', special=True) == tok.encode('[PAD500]')
    r = llama.complete(tok.encode('The'), 20, logit_bias=[[i, 1000.] for i in range(500, 504)])  # such rows can be picked, as everywhere
    assert set(r['tokens']) <= {500, 501, 502, 503} and r['content'] == ''
    small = TinyTransformer(ModelConfig(vocab_size=499, **BASE), seed=0)
    with pytest.raises(UserError, match='500 ids, the model 499 rows'): export_gguf((small, tok), tmp_path/'b.gguf')

def test_a_token_that_has_the_name_of_a_blank(tmp_path):
    t = Tokenizer.train([], 258, special=['[PAD258]'])
    k, _ = keys(written(tmp_path, (tiny(t), t)))
    assert k['tokenizer.ggml.tokens'].count('[PAD258]') == 1 and k['tokenizer.ggml.tokens'][258] == '[PAD258]_'

# How it is written

def test_what_stands_there_stays(tok, model, tmp_path):
    f = written(tmp_path, (model, tok))
    before = f.read_bytes()
    with pytest.raises(UserError, match='exists already.*--overwrite'): export_gguf((model, tok), f)
    (tmp_path/'thesis.txt').write_text('years'); (tmp_path/'d').mkdir()
    for p,why in (('thesis.txt', 'no GGUF file'), ('d', 'is a directory'), ('new/', 'is a directory'), ('thesis.txt/a.gguf', 'thesis.txt is not a directory')):
        with pytest.raises(UserError, match=why): export_gguf((model, tok), f'{tmp_path}/{p}', overwrite=True)
    bad = TinyTransformer(model.cfg, seed=0)
    for x,why in ((float('nan'), 'NaN or infinity'), (float('-inf'), 'NaN or infinity'), (7e4, 'more than F16 can')):
        with torch.no_grad(): bad.params()['final_norm' if x != 7e4 else 'blocks.1.w_down'][3] = x
        with pytest.raises(UserError, match=why): export_gguf((bad, tok), f, 'F16', overwrite=True)
        with torch.no_grad(): bad.params()['final_norm'].fill_(1.)
    with pytest.raises(UserError, match='dtype is Q4_0'): export_gguf((model, tok), f, 'q4_0', overwrite=True)
    with pytest.raises(UserError, match='does not exist'): export_gguf(tmp_path/'nowhere', f, overwrite=True)
    assert f.read_bytes() == before and sorted(p.name for p in tmp_path.iterdir()) == ['F32.gguf', 'd', 'thesis.txt']

def test_killed_at_any_time_it_is_whole_or_not_there(tok, tmp_path):
    cfg = ModelConfig(vocab_size=20_000, **(BASE | dict(dim=256)))
    export_hf(TinyTransformer(cfg, seed=0), tok, tmp_path/'dir')
    code = f"import sys; from xtrain.gguf import export_gguf; import gguf; print('ready', flush=True); sys.stdin.read(1); export_gguf({str(tmp_path/'dir')!r}, {str(tmp_path/'a.gguf')!r}, 'Q8_0', overwrite=True)"
    whole = Path(export_gguf(tmp_path/'dir', tmp_path/'b.gguf', 'Q8_0')['path']).read_bytes()
    (tmp_path/'a.gguf').write_bytes(whole)
    for delay in (.1, .4, .8):
        p = subprocess.Popen([sys.executable, '-c', code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | dict(OMP_NUM_THREADS='1'))
        p.stdout.readline(); p.stdin.write(b'x'); p.stdin.flush(); time.sleep(delay); p.send_signal(signal.SIGKILL); p.wait()
        assert (tmp_path/'a.gguf').read_bytes() == whole
    export_gguf(tmp_path/'dir', tmp_path/'a.gguf', 'Q8_0', overwrite=True)       # and sweeps up
    assert sorted(p.name for p in tmp_path.iterdir()) == ['a.gguf', 'b.gguf', 'dir']

def test_memory_is_that_of_one_tensor(tok, tmp_path):
    "60 MB of embedding in a model of 180 MB, written in a process that may not grow by more than the one"
    cfg = ModelConfig(vocab_size=60_000, **(BASE | dict(dim=256, ffn_dim=8192, n_layers=5)))
    export_hf(TinyTransformer(cfg, seed=0), tok, tmp_path/'dir', dtype=torch.float32, max_shard_size='80MB')
    code = f"""import resource, torch, gguf
from xtrain.gguf import export_gguf; from xtrain.tokenizer import Tokenizer; from xtrain.hf import open_weights
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss/1024
open_weights({str(tmp_path/'dir')!r}); start = peak()
export_gguf({str(tmp_path/'dir')!r}, {str(tmp_path/'a.gguf')!r}, 'F32')
print(peak()-start)"""
    r = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True, env=os.environ | dict(OMP_NUM_THREADS='1'))
    assert float(r.stdout) < 60_000*256*4/2**20 + 25 and (tmp_path/'a.gguf').stat().st_size > 240e6

# The command

def test_the_command(tok, model, tmp_path):
    from click.testing import CliRunner
    from xtrain.cli import main
    export_hf(model, tok, tmp_path/'dir')
    run = lambda *a: CliRunner().invoke(main, ['gguf', str(tmp_path/'dir'), *a])
    r = run(str(tmp_path/'a.gguf'))
    assert r.exit_code == 0 and 'in BF16' in r.output and 'architecture qwen3, tokenizer qwen2' in r.output and '4 of 504 rows have no token' in r.output
    assert json.loads(run(str(tmp_path/'b.gguf'), '--dtype', 'q8_0', '--json').stdout)['bytes'] == (tmp_path/'b.gguf').stat().st_size
    r = run(str(tmp_path/'a.gguf'))
    assert r.exit_code == 1 and r.stderr.count('\n') == 1 and 'exists already' in r.stderr
    assert run(str(tmp_path/'c.gguf'), '--dtype', 'q4_k').exit_code == 2

def test_interleave_is_a_permutation_of_each_head():
    w = torch.arange(2*6*3).view(12, 3)
    assert interleave(w, 6)[:6, 0].tolist() == [0, 9, 3, 12, 6, 15] and sorted(interleave(w, 6)[:, 0].tolist()) == w[:, 0].tolist()
