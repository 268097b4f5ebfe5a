"Tokenizer: exact round trips, control tokens as text, streaming, damaged files, enormous pieces, odd vocabularies, other engines, files that strangers wrote."
import json, os, random, re, resource, subprocess, sys, time, warnings
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from hard import KINDS, hard, made_raw
from tokenizers import Tokenizer as Raw, decoders as D, models, pre_tokenizers
from xtrain.config import UserError
from xtrain.stories import Stories
from xtrain.tokenizer import QWEN2_SPLIT, Tokenizer, TokenStream, as_qwen2, cut_long, library, new_raw, pre_name, tokenizer_files

NASTY = ['', '\0', ' ', '  two before', 'two after  ', 'tab\tand\nlines\r\n', '\n\n\n\n', 'naïve vs nai\u0308ve', 'ß İ ı ǅ', '世界，你好', 'سلام', 'ทดสอบ', '😀👍🏽', '👨\u200d👩\u200d👧',
         '🏳️\u200d🌈', '❤️', 'o\u0302\u0323', '\ufeffmark', '\u200bno width', '0123 4.5 6,789,000', "don't I'LL we'Re", '<|endoftext|>', '<|im_start|>user', '    if x:\n        return y\n',
         'z'*300, '\ud7ff\ue000\uffff', ' \u00a0\u2003\u3000', '\U0010ffff', 'a\r\nb\rc', '\u2028\u2029\x85']

@pytest.fixture(scope='module')
def texts(): return [Stories(1).story(i).text for i in range(400)]

@pytest.fixture(scope='module')
def tok(texts): return Tokenizer.train(texts, 700)

def gpt2_like(texts, **extra):
    raw = Raw(models.BPE()); raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False); raw.decoder = D.ByteLevel()
    from tokenizers.trainers import BpeTrainer
    raw.train_from_iterator(texts, BpeTrainer(vocab_size=500, special_tokens=['<|endoftext|>'], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    return json.loads(raw.to_str()) | extra

def stream(tok, ids, **kw):
    s = TokenStream(tok, **kw)
    return [s.push(i) for i in ids] + [s.flush()]

# Training

def test_ids_and_order(texts, tok):
    assert (tok.vocab_size, tok.eos_id, tok.eos_token, len(tok)) == (700, 0, '<|endoftext|>', 700)
    assert Tokenizer.train(texts[::-1], 700).json == tok.json
    assert Tokenizer.train([], 257).vocab_size == 257
    assert Tokenizer.train(['ab']*3, 5000).vocab_size == 258                     # the text runs out of pairs

def test_threads_do_not_matter(texts, tok):
    code = 'import sys; from xtrain.tokenizer import Tokenizer; from xtrain.stories import Stories; print(Tokenizer.train((Stories(1).story(i).text for i in range(400)), 700).sha256)'
    r = subprocess.run([sys.executable, '-c', code], env=os.environ | dict(RAYON_NUM_THREADS='3', TOKENIZERS_PARALLELISM='true', PYTHONHASHSEED='5'), capture_output=True, text=True, check=True)
    assert r.stdout.strip() == tok.sha256

def test_split_is_qwen2s_to_the_letter(tok):
    pytest.importorskip('transformers')
    from transformers.models.qwen2 import tokenization_qwen2 as q
    assert QWEN2_SPLIT == q.PRETOKENIZE_REGEX and pre_name(tok) == 'qwen2'

def test_agrees_with_transformers_qwen2(tok):
    "The class that transformers 5 builds for Qwen2 gives the same ids from our merges (it composes accents first, so only composed text)"
    transformers = pytest.importorskip('transformers')
    m = json.loads(tok.json)['model']
    hf = transformers.Qwen2Tokenizer(vocab=m['vocab'], merges=[tuple(x) for x in m['merges']])
    import unicodedata
    for s in NASTY:
        if unicodedata.is_normalized('NFC', s) and '<|' not in s: assert hf.encode(s, add_special_tokens=False) == tok.encode(s), s

@pytest.mark.parametrize('n', [0, 1, 255, 256, -5])
def test_too_small_a_vocabulary(texts, n):
    with pytest.raises(UserError, match=f'vocab_size {n} is too small.*257'): Tokenizer.train(texts, n)

def test_control_tokens_are_declared_once_and_are_no_words(texts):
    t = Tokenizer.train(texts, 400, special=['<|a|>', '<|a|>', '<|endoftext|>'])
    assert t.encode('<|endoftext|><|a|>', special=True) == [0, 1] and t.special_ids == {0, 1}
    for word in ('the', ' the', 'otter', '\n', '', 'é'):
        with pytest.raises(UserError, match='could be a word|several pieces'): Tokenizer.train(texts, 400, special=[word])
    with pytest.raises(UserError, match='could be a word'): Tokenizer.train(texts, 400, eos='the')
    t = Tokenizer.train(texts, 400, eos=None)
    assert t.eos_id is None and t.stop_ids == [] and t.decode(t.encode('Hi')) == 'Hi'

# Round trips

def test_round_trips(tok, texts):
    other = Tokenizer(json.dumps(gpt2_like(texts)), '<|endoftext|>')
    byte = Tokenizer.train([], 257)
    for t in (tok, other, byte):
        for s in NASTY:
            assert t.decode(t.encode(s)) == s
            assert t.raw.decode(t.encode(s), skip_special_tokens=False) == s
        assert t.encode_batch(NASTY) == [t.encode(s) for s in NASTY]

@settings(max_examples=150, deadline=None)
@given(st.text(st.characters(exclude_categories=['Cs'])))
def test_any_text(s):
    t = BYTES
    assert t.decode(t.encode(s)) == s == ''.join(stream(t, t.encode(s)))
BYTES = Tokenizer.train(['the cat sat on the mat, 世界 世界 世界 😀😀😀']*3, 280)

def test_lone_surrogates_are_refused(tok):
    for s in ('\ud83d', 'abc\udc80'):
        with pytest.raises(UserError, match='lone surrogate'): tok.encode(s)
        with pytest.raises(UserError, match='lone surrogate'): tok.encode(s, special=True)
        with pytest.raises(UserError, match='lone surrogate'): Tokenizer.train([s], 300)

# Special text in data

def test_special_text_is_text(tok):
    s = '<|endoftext|> is written<|endoftext|>'
    ids = tok.encode(s)
    assert 0 not in ids and tok.decode(ids) == s
    assert tok.encode(s, special=True).count(0) == 2 and tok.raw.encode(s).ids.count(0) == 2
    assert tok.decode([0, *tok.encode('x'), 0]) == '<|endoftext|>x<|endoftext|>'
    assert tok.decode([0, *tok.encode('x'), 0], special=False) == 'x'

def test_added_tokens_that_are_not_special_are_text_too(texts):
    d = gpt2_like(texts)
    n = max(d['model']['vocab'].values())+1
    d['added_tokens'] += [dict(id=n, content='<think>', single_word=False, lstrip=False, rstrip=False, normalized=False, special=False)]
    t = Tokenizer(json.dumps(d), '<|endoftext|>')
    assert n in t.raw.encode('a<think>b').ids and n not in t.encode('a<think>b') and n in t.encode('a<think>b', special=True)
    assert t.decode(t.encode('a<think>b')) == 'a<think>b' and t.vocab_size == n+1

def test_bent_declarations_are_refused(texts):
    d = gpt2_like(texts); a = d['added_tokens'][0]
    with pytest.raises(UserError, match='two ids, 0 and 7'): Tokenizer(json.dumps(d | dict(added_tokens=[a, a | dict(id=7)])))
    with pytest.raises(UserError, match='says id 9999'): Tokenizer(json.dumps(d | dict(added_tokens=[a, a | dict(id=9999, content='<|x|>')])))
    assert Tokenizer(json.dumps(d | dict(added_tokens=[a, a]))).special_ids == {0}

def test_truncation_padding_and_templates_in_the_file_do_nothing(texts):
    raw = Raw.from_str(json.dumps(gpt2_like(texts)))
    raw.enable_truncation(3); raw.enable_padding(length=20)
    from tokenizers.processors import TemplateProcessing
    raw.post_processor = TemplateProcessing(single='<|endoftext|> $A', special_tokens=[('<|endoftext|>', 0)])
    t = Tokenizer(raw.to_str(), '<|endoftext|>')
    for s in (texts[0], 'Hi'): assert t.decode(t.encode(s)) == s == t.decode(t.encode(s, special=True)) and 0 not in t.encode(s)

def word_level(vocab, decoder=None):
    raw = Raw(models.WordLevel({t:i for i,t in enumerate(vocab)}, unk_token=vocab[0]))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    if decoder: raw.decoder = decoder
    return raw.to_str()

def test_an_eos_that_text_can_form(tmp_path):
    (tmp_path/'tokenizer.json').write_text(word_level(['<unk>', 'stop', 'go']))
    with pytest.raises(UserError, match="'stop' is an ordinary word"): Tokenizer.load(tmp_path, eos='stop')
    (tmp_path/'tokenizer_config.json').write_text('{"eos_token": "stop"}')
    t = Tokenizer.load(tmp_path)                                                 # the files say so: it loads,
    assert t.encode('go go') == [2, 2]
    with pytest.raises(UserError, match="holds 'stop'"): t.encode('go stop')     # but never ends a document by itself

# Unknown ids

def test_ids_that_no_token_has(tok, texts):
    for t in (tok, Tokenizer(word_level(['<unk>', 'a', 'b']))):
        ids = t.encode('a')
        assert t.decode([*ids, t.vocab_size, 10**9]) == t.decode(ids) == ''.join(stream(t, [*ids, t.vocab_size, 10**9]))
        with pytest.raises(ValueError, match='-100'): t.decode([-100])
        with pytest.raises(ValueError, match='-1'): TokenStream(t).push(-1)

def test_holes_in_the_vocabulary(texts):
    d = gpt2_like(texts)
    d['model']['vocab']['ĠZebra'] = 600
    t = Tokenizer(json.dumps(d), '<|endoftext|>')
    assert t.vocab_size == 601 and t.decode([550, 600, 599]) == ' Zebra' == ''.join(stream(t, [550, 600, 599]))

# Streaming

def test_streams_never_split_a_character(tok, texts):
    for t in (tok, Tokenizer.train([], 257)):
        for s in NASTY:
            ids = t.encode(s)
            out = stream(t, ids)
            assert ''.join(out) == s and ('\ufffd' not in ''.join(out) or '\ufffd' in s)
            for n in range(len(ids)):
                got = ''.join(stream(t, ids[:n]))
                assert got == t.decode(ids[:n])
                assert s.startswith(got.rstrip('\ufffd')) and len(got) - len(got.rstrip('\ufffd')) <= 1

def test_broken_bytes_are_marked_as_the_library_marks_them(tok):
    rng = random.Random(0)
    for _ in range(400):
        ids = [rng.randrange(tok.vocab_size) for _ in range(rng.randrange(1, 30))]
        assert ''.join(stream(tok, ids)) == tok.decode(ids) == tok.raw.decode(ids, skip_special_tokens=False)

def test_text_comes_as_soon_as_it_can(tok):
    s = TokenStream(Tokenizer.train([], 257))
    ids = s.tok.encode('a你b')
    assert [s.push(i) for i in ids] == ['a', '', '', '你', 'b']

def test_a_stream_is_linear(tok):
    ids = tok.encode(' '.join(Stories(0).story(i).text for i in range(40)))*10
    t = time.process_time(); out = ''.join(stream(tok, ids)); t = time.process_time()-t
    assert out == tok.decode(ids) and t < 1e-4*len(ids)

OTHERS = {
    'sentencepiece': (['<unk>', '▁a', '▁bc', 'd', '▁', '\ufffd', *[f'<0x{b:02X}>' for b in '你😀'.encode()]], D.Sequence([D.Replace('▁', ' '), D.ByteFallback(), D.Fuse(), D.Strip(' ', 1, 0)])),
    'metaspace': (['<unk>', '▁a', '▁bc', 'd', '▁'], D.Metaspace()),
    'wordpiece': (['[UNK]', 'a', 'bc', '##d', '.', "'", '##s'], D.WordPiece()),
    'suffix': (['<unk>', 'a</w>', 'bc', 'd</w>'], D.BPEDecoder()),
    'none': (['<unk>', 'a', 'bc'], None),
}
@pytest.mark.parametrize('kind', OTHERS)
def test_streams_of_other_kinds(kind):
    vocab, dec = OTHERS[kind]
    t, rng = Tokenizer(word_level(vocab, dec)), random.Random(1)
    for n in [1, 2, 3, 10, 63, 64, 65, 66, 200]*8:
        ids = [rng.randrange(t.vocab_size+1) for _ in range(n)]
        assert ''.join(stream(t, ids)) == t.decode(ids)
        if kind != 'sentencepiece': assert t.decode(ids) == t.raw.decode([i for i in ids if i < t.vocab_size], skip_special_tokens=False)
    if kind == 'sentencepiece':
        assert stream(t, [1, 6, 7, 8, 3]) == ['a', '', '', '你', 'd', ''] and t.decode([1, 6, 7]) == 'a\ufffd' == ''.join(stream(t, [1, 6, 7]))

# Loading

def test_what_is_saved_is_loaded(tok, tmp_path):
    tok.save(tmp_path); tok.save(tmp_path/'copy.json')
    a, b = Tokenizer.load(tmp_path), Tokenizer.load(tmp_path/'copy.json')
    assert a.json == b.json == tok.json == (tmp_path/'tokenizer.json').read_bytes().decode() and a.sha256 == tok.sha256 and a.eos_id == 0
    one = json.dumps(json.loads(tok.json))                                       # another lay-out is kept as it is
    (tmp_path/'tokenizer.json').write_text(one)
    Tokenizer.load(tmp_path).save(tmp_path/'again.json')
    assert (tmp_path/'again.json').read_text() == one

@pytest.mark.parametrize('data,why', [(b'', 'empty'), (b'  \n', 'empty'), (b'{"a": 1', 'line 1'), (b'[1]', 'no "model"'), (b'{"model": 3}', 'no "model"'), (b'{"model": {"type": "Odd"}}', 'not a usable'),
                                      (b'\x80\x04\x95', 'not UTF-8'), (b'version https://git-lfs.github.com/spec/v1\n', 'line 1'), (b'['*100_000, 'recursion|nested|no "model"'),
                                      (b'{"model": {"type": "BPE", "vocab": {}, "merges": []}}', 'empty')])
def test_damaged_files_say_so_in_a_line(tmp_path, data, why):
    f = tmp_path/'tokenizer.json'
    f.write_bytes(data)
    with pytest.raises(UserError, match=f'(?s){f}.*({why})') as e: Tokenizer.load(f)
    assert '\n' not in str(e.value)

def test_places_that_hold_no_tokenizer(tmp_path):
    for p in (tmp_path, tmp_path/'no', tmp_path/'no'/'tokenizer.json'):
        with pytest.raises(UserError, match='tokenizer.json'): Tokenizer.load(p)
    os.mkfifo(tmp_path/'tokenizer.json')
    with pytest.raises(UserError, match='not a file'): Tokenizer.load(tmp_path)

def put(dir, tok, **files):
    tok.save(dir/'tokenizer.json')
    for n in ('tokenizer_config', 'generation_config', 'config'): (dir/f'{n}.json').unlink(missing_ok=True)
    for n,c in files.items(): (dir/f'{n}.json').write_text(json.dumps(c))
    return Tokenizer.load(dir)

def test_where_the_eos_is_said(tmp_path, texts):
    t = Tokenizer.train(texts, 400, eos='<|x|>', special=['<|im_end|>', '<|endoftext|>'])        # ids 0, 1, 2
    eos = lambda **f: (lambda r: (r.eos_id, r.stop_ids))(put(tmp_path, t, **f))
    assert eos() == (2, [2])                                                                  # a well-known name
    assert eos(tokenizer_config={'eos_token': '<|x|>'}) == (0, [0])                           # id 0 is an id
    assert eos(tokenizer_config={'eos_token': {'content': '<|im_end|>'}}, generation_config={'eos_token_id': [1, 0]}) == (1, [1, 0])
    assert eos(config={'eos_token_id': 0}) == (0, [0])
    assert eos(generation_config={'eos_token_id': [2, 0]}, config={'eos_token_id': 2}) == (2, [2, 0])
    assert eos(tokenizer_config={'eos_token': None}, config={'eos_token_id': None}) == (None, [])     # none is an answer
    assert eos(tokenizer_config={}, config={'model': {}, 'data': {'eos_id': 0}}) == (0, [0])  # a run's own config
    assert eos(config={'model': {}, 'data': {'eos_id': None}}) == (None, [])
    assert Tokenizer.load(tmp_path, eos='<|im_end|>').eos_id == 1 and Tokenizer.load(tmp_path, eos=0).eos_id == 0
    with pytest.raises(UserError, match='not in the vocabulary'): Tokenizer.load(tmp_path, eos='</s>')
    with pytest.raises(UserError, match='not in the vocabulary'): Tokenizer.load(tmp_path, eos=400)
    with pytest.raises(UserError, match="'</s>', which is not"): put(tmp_path, t, tokenizer_config={'eos_token': '</s>'})
    for odd in ({'a': 1}, [[0]], 1.5, True):
        with pytest.raises(UserError, match='config.json: eos_token_id'): put(tmp_path, t, config={'eos_token_id': odd})
    t.save(tmp_path/'tokenizer.json'); (tmp_path/'config.json').write_text('{')
    with pytest.raises(UserError, match='config.json: cannot read'): Tokenizer.load(tmp_path)

def test_names_for_other_engines(texts, tok):
    assert pre_name(Tokenizer(json.dumps(gpt2_like(texts)))) == 'gpt-2'
    d = json.loads(tok.json)
    assert pre_name(Tokenizer(json.dumps(d | dict(normalizer={'type': 'NFC'})))) is None
    d['pre_tokenizer']['pretokenizers'][0]['pattern']['Regex'] += 'x'
    assert pre_name(Tokenizer(json.dumps(d))) is None
    assert pre_name(Tokenizer(word_level(['<unk>', 'a']))) is None

# Enormous pieces

@pytest.mark.parametrize('what', ['letters', 'same', 'blanks', 'lines', 'signs', 'cjk'])
def test_a_megabyte_without_a_break(what):
    rng = random.Random(0)
    n = 1<<20
    s = dict(letters=''.join(rng.choices('abcdefghijklmnopqrstuvwxyz', k=n)), same='a'*n, blanks=' '*n, lines='\n'*n, signs='='*n, cjk=''.join(rng.choices('世界你好天地人', k=n//8)))[what]
    t = time.process_time()
    with pytest.warns(UserWarning, match='cut every 1024'): tok = Tokenizer.train([s], 300)
    ids = tok.encode(s)
    assert time.process_time()-t < 60                                             # seconds in truth; a slow machine may take more
    assert tok.decode(ids) == s and len(ids) < len(s.encode())

def test_cuts_are_rare_and_exact():
    split = new_raw().pre_tokenizer.pre_tokenize_str
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        Tokenizer.train(['word '*5000, '世界，你好。'*2000, 'a1'*4000], 300)         # long runs, short pieces
    for s in ('x'*5000, 'a '+'b'*2500+' c', ' '*3000+'x', '-'*2049):
        cut = cut_long(s, split)
        assert ''.join(cut) == s and len(cut) > 1 and max(len(p) for c in cut for p,_ in split(c)) <= 1025

# What other engines make of it

ASK = """import json, sys, warnings; warnings.simplefilter('ignore')
import transformers; transformers.logging.set_verbosity(50)
from transformers import AutoTokenizer
try: from vllm.tokenizers import get_tokenizer
except ImportError: get_tokenizer = None
out = {}
texts = json.load(open(sys.argv[1]))
for dir in sys.argv[2:]:
    try: t = AutoTokenizer.from_pretrained(dir, local_files_only=True)
    except Exception as e: out[dir] = repr(e); continue
    with_, without = [t(s)['input_ids'] for s in texts], [t(s, add_special_tokens=False)['input_ids'] for s in texts]
    if get_tokenizer: v = get_tokenizer(dir); assert [v.encode(s) for s in texts] == with_ and [v.encode(s, add_special_tokens=False) for s in texts] == without, dir
    out[dir] = dict(with_=with_, without=without, text=[t.decode(i) for i in without], eos=t.eos_token_id, template=t.chat_template)
print(json.dumps(dict(version=transformers.__version__, out=out)))"""

class Cfg:
    "What `tokenizer_files` asks of a model's config"
    def __init__(self, type): self.type, self.max_seq_len, self.qkv_bias = type, 128, type == 'qwen2'

# Other versions, by hand: XTRAIN_PYTHONS=/path/a/bin/python:/path/b/bin/python pytest tests/test_tokenizer.py -k engines
PYTHONS = [sys.executable, *filter(None, os.environ.get('XTRAIN_PYTHONS', '').split(':'))]

@pytest.fixture(scope='module')
def exports(tmp_path_factory):
    "A directory for each kind of tokenizer and model, or why there is none"
    home, made, refused = tmp_path_factory.mktemp('exports'), {}, {}
    (home/'texts.json').write_text(json.dumps(hard()))
    for name,(_, eos, _) in KINDS.items():
        raw = made_raw(name)
        t = Tokenizer(raw.to_str(), eos)
        if name == 'qwen2': t.chat_template = '{{ messages }}'
        want = [raw.encode(s) for s in hard()]
        for type in ('qwen3', 'qwen2', 'llama', 'llama-served'): # The last with names as an imported directory has them
            d, served, type = home/f'{name}-{type}', type.endswith('served') and [a for a in raw.get_added_tokens_decoder().values() if a.special], type.split('-')[0]
            if served: t.serving = {'tokenizer_config.json': dict(bos_token=served[0].content, pad_token=served[-1].content, additional_special_tokens=[a.content for a in served], padding_side='left')}
            try: files = tokenizer_files(t, Cfg(type))
            except UserError as e: refused[d.name] = str(e); continue
            d.mkdir()
            for n,b in files.items(): (d/n).write_bytes(b)
            (d/'config.json').write_text(json.dumps(dict(model_type=type, vocab_size=2000, hidden_size=32, num_attention_heads=1, num_key_value_heads=1, eos_token_id=t.eos_id, transformers_version='4.51.0')))
            made[d.name] = t, [e.ids for e in want], [raw.encode(s, add_special_tokens=False).ids for s in hard()]
    return home, made, refused

@pytest.mark.parametrize('where', ['eos', 'bos'])
def test_what_is_named_must_be_an_added_token(where):
    "Engines add it themselves, and then find it in text, where tokenizer.json does not"
    from transformers import PreTrainedTokenizerFast
    d = json.loads(Tokenizer.train(['the cat sat on the mat. '*9], 300).json)
    d['added_tokens'] = []
    if where == 'bos': d['post_processor'] = dict(type='TemplateProcessing', single=[{'SpecialToken': dict(id='<|endoftext|>', type_id=0)}, {'Sequence': dict(id='A', type_id=0)}], pair=[], special_tokens={'<|endoftext|>': dict(id='<|endoftext|>', ids=[0], tokens=['<|endoftext|>'])})
    t = Tokenizer(json.dumps(d), '<|endoftext|>' if where == 'eos' else None)
    with pytest.raises(UserError, match="'<|endoftext|>' begins or ends a text, but is not among its added_tokens".replace('|', '[|]')): tokenizer_files(t, Cfg('qwen3'))
    theirs = PreTrainedTokenizerFast(tokenizer_object=t.raw, **{f'{where}_token': '<|endoftext|>'})
    assert 0 in theirs('a<|endoftext|>b', add_special_tokens=False)['input_ids'] and 0 not in t.encode('a<|endoftext|>b')

@pytest.mark.parametrize('python', PYTHONS)
def test_engines_read_it_as_tokenizer_json_says(exports, python):
    "Ids of every text, with and without what the file's template adds, and the way back"
    pytest.importorskip('transformers')
    home, made, refused = exports
    r = subprocess.run([python, '-c', ASK, str(home/'texts.json'), *(str(home/n) for n in made)], capture_output=True, text=True, cwd=home)
    assert r.returncode == 0, r.stderr[-2000:]
    r = json.loads(r.stdout)
    for n,(t, with_, without) in made.items():
        got = r['out'][str(home/n)]
        assert isinstance(got, dict), f'transformers {r["version"]}, {n}: {got}'
        for what,want in (('with_', with_), ('without', without)):
            bad = [s for s,a,b in zip(hard(), got[what], want) if a != b]
            assert not bad, f'transformers {r["version"]} reads {n} otherwise: {bad[:3]}'
        assert got['eos'] == t.eos_id and got['template'] == t.chat_template
        if t.byte_level: assert got['text'] == [t.decode(i) for i in without]

def test_a_qwen2_model_takes_qwen2s_tokenizer_only(exports):
    "transformers 5 would read another otherwise: which engine, and which text"
    _, made, refused = exports
    assert [n for n in made if n.endswith('-qwen2')] == ['qwen2-qwen2']
    assert set(refused) == {f'{n}-qwen2' for n in KINDS if n != 'qwen2'}
    for n,why in refused.items(): assert 'transformers 5' in why and '\n' not in why and re.search(r"'[^']+' would become other ids", why), why
    assert "NFC" in refused['ours-qwen2'] and "e\\u0301" in refused['ours-qwen2']

def test_transformers_really_reads_a_qwen2_directory_otherwise(exports, tmp_path):
    "Else the refusal is for nothing"
    transformers = pytest.importorskip('transformers')
    t = Tokenizer(made_raw('ours').to_str(), '<|endoftext|>')
    for n,b in tokenizer_files(t, Cfg('qwen3')).items(): (tmp_path/n).write_bytes(b)
    (tmp_path/'config.json').write_text('{"model_type": "qwen2"}')
    got = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert got('e\u0301')['input_ids'] == as_qwen2(t).encode('e\u0301').ids != t.encode('e\u0301')

def test_templates_are_known(tmp_path):
    for name,front,behind in (('ours', [], []), ('llama3', [0], []), ('bert', [2], [3]), ('llama2', [1], [])):
        t = Tokenizer(made_raw(name).to_str(), KINDS[name][1])
        assert (t.front, t.behind) == (front, behind)
        c = json.loads(tokenizer_files(t, Cfg('qwen3'))['tokenizer_config.json'])
        assert c['bos_token'] == (t.raw.id_to_token(front[0]) if front else None) and ('add_bos_token' in c) == (not front)

def test_chat_templates_are_found(tmp_path, tok):
    has = lambda **f: put(tmp_path, tok, **f).chat_template
    assert has() is None and has(tokenizer_config={'chat_template': 'x'}) == 'x' and has(tokenizer_config={'chat_template': None}) is None
    assert has(tokenizer_config={'chat_template': [{'name': 'tool', 'template': 'a'}, {'name': 'default', 'template': 'b'}]}) == 'b'
    with pytest.raises(UserError, match='chat_template must be text'): has(tokenizer_config={'chat_template': 3})
    (tmp_path/'chat_template.jinja').write_text('é')
    assert has(tokenizer_config={'chat_template': 'x'}) == 'é'
    (tmp_path/'chat_template.jinja').write_bytes(b'\xff')
    with pytest.raises(UserError, match='chat_template.jinja: cannot read'): has()

# Files that strangers wrote

def test_a_panic_is_one_line(tok, capfd):
    d = json.loads(tok.json)
    slow = lambda p: d | dict(pre_tokenizer=dict(type='Split', pattern=dict(Regex=p), behavior='Isolated', invert=False))
    for p in (r'(a+)+$', r'(a|aa)+$', r'(\w+\s?)*\d'):
        t, at = Tokenizer(json.dumps(slow(p))), time.process_time()
        for f in (t.encode, lambda s: t.encode(s, special=True), lambda s: t.encode_batch([s]*3)):
            with pytest.raises(UserError, match='it failed at a text: Onig: Regex search error: retry-limit') as e: f('a'*200 + '!')
            assert '\n' not in str(e.value)
        assert time.process_time()-at < 20
    strip = dict(type='Strip', content='x', start=2**40, stop=2**40)
    with pytest.raises(UserError, match='range|slice|index') as e: Tokenizer(word_level(['<unk>', 'x']).replace('"decoder":null', f'"decoder":{json.dumps(strip)}')).decode([1])
    assert 'panicked' not in capfd.readouterr().err

def test_other_peoples_stderr_is_kept(capfd):
    with library('x', 'y'): os.write(2, b'a warning')
    assert capfd.readouterr().err == 'a warning'

def bombs(d):
    m, a = d['model'], d['added_tokens'][0]
    double = dict(type='Replace', pattern=dict(String='a'), content='aa')
    deep = double
    for _ in range(100): deep = dict(type='Sequence', normalizers=[deep])
    yield 'id 4,294,967,295', d | dict(model=m | dict(vocab=m['vocab'] | {'zzz': 2**32-1}))
    yield 'added tokens have 3,0', d | dict(added_tokens=[a, a | dict(id=9999, content='x'*3_000_000)])
    yield 'times longer', d | dict(normalizer=dict(type='Sequence', normalizers=[double]*40))
    yield 'times longer', d | dict(normalizer=dict(type='Replace', pattern=dict(Regex=''), content='a'*100_000))
    yield 'times longer', d | dict(normalizer=dict(type='Prepend', prepend='a'*100_000))
    yield 'times longer', d | dict(pre_tokenizer=dict(type='Sequence', pretokenizers=[dict(type='ByteLevel', add_prefix_space=False, trim_offsets=False, use_regex=False)]*12))
    yield 'times longer', d | dict(decoder=dict(type='Sequence', decoders=[double]*40))
    yield 'rules, more than 64', d | dict(normalizer=deep)
    yield '2,004 rules', d | dict(normalizer=dict(type='Sequence', normalizers=[dict(type='NFC')]*2000))
    yield 'times longer', d | dict(normalizer=[[double]*40])                 # the library reads lists too
    yield 'dropout is 0.1', d | dict(model=m | dict(dropout=.1))

@pytest.mark.parametrize('n', range(11))
def test_bombs_are_refused_before_they_go_off(tok, n):
    why, d = list(bombs(json.loads(tok.json)))[n]
    at = time.process_time()
    with pytest.raises(UserError, match=why) as e: Tokenizer(json.dumps(d))
    assert '\n' not in str(e.value) and len(str(e.value)) < 500 and time.process_time()-at < 5

def test_files_of_absurd_size(tmp_path):
    with open(tmp_path/'tokenizer.json', 'wb') as f: f.truncate(10**11)          # sparse: it takes no room
    with pytest.raises(UserError, match='larger than 100,000,000 bytes'): Tokenizer.load(tmp_path)

ODD = [None, True, 0, -1, 2**31, 2**32, 2**64, 1e308, .5, '', 'a', '\0', 'Ġ', 'é', '\ud800', 'x'*1000, [], {}, [[]], [1], '[', '(a+)+$', '.*', {'Regex': '(a*)*b'}, {'String': ''}, {'Regex': ''}, 'isolated', 'Removed', {'type': 'NFC'}, {'type': 'BPE'},
    {'type': 'Sequence', 'normalizers': []}, {'type': 'Sequence', 'pretokenizers': []}, {'type': 'Sequence', 'decoders': []}, {'type': 'Replace', 'pattern': {'String': ''}, 'content': 'aa'}, {'type': 'Prepend', 'prepend': ''},
    {'type': 'Precompiled', 'precompiled_charsmap': 'AAAA'}, {'type': 'Metaspace', 'replacement': '▁', 'prepend_scheme': 'always'}, {'type': 'Strip', 'content': ' ', 'start': 2**40, 'stop': 2**40}, {'type': 'CTC', 'pad_token': '', 'word_delimiter_token': '', 'cleanup': True},
    {'type': 'TemplateProcessing', 'single': [{'SpecialToken': {'id': 'a', 'type_id': 0}}], 'pair': [], 'special_tokens': {}}, {'type': 'BertProcessing', 'sep': ['a', 2**32-1], 'cls': ['b', 0]}, {'type': 'FixedLength', 'length': 0}, {'type': 'Digits', 'individual_digits': True},
    {'direction': 'Right', 'max_length': 0, 'strategy': 'LongestFirst', 'stride': 5}, {'strategy': {'Fixed': 2**40}, 'direction': 'Left', 'pad_to_multiple_of': 0, 'pad_id': 0, 'pad_type_id': 0, 'pad_token': 'x'}]

def spots(x, at=()):
    if at: yield at
    items = list(x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ())
    for k,v in items[:3] + items[3:30] if len(items) <= 30 else items[:3] + items[-3:]: yield from spots(v, (*at, k))

@st.composite
def bent(draw, bases):
    "A tokenizer.json, bent in one to three places; or a few of its bytes are others"
    d, odd, copy = json.loads(draw(st.sampled_from(bases))), lambda: copy(draw(st.sampled_from(ODD))), lambda x: json.loads(json.dumps(x))
    for _ in range(draw(st.integers(1, 3))):
        *path, key = draw(st.sampled_from(list(spots(d)) or [('model',)]))
        try:
            x = d
            for k in path: x = x[k]
            match draw(st.sampled_from(['other', 'other', 'gone', 'copy', 'more'])):
                case 'other': x[key] = odd()
                case 'gone': del x[key]
                case 'copy': x[key] = copy(d[draw(st.sampled_from(list(d)))])
                case 'more' if isinstance(x, list): x.append(copy(x[key]))
                case 'more': x[draw(st.sampled_from(['type', 'special', 'id', 'content', 'dropout', 'prepend_scheme', 'x']))] = odd()
        except (KeyError, IndexError, TypeError): pass
    b = bytearray(json.dumps(d, ensure_ascii=draw(st.booleans())).encode('utf-8', 'surrogatepass'))
    if draw(st.integers(0, 9)) == 0:
        for _ in range(draw(st.integers(1, 4))): b[draw(st.integers(0, len(b)-1))] = draw(st.integers(0, 255))
    return bytes(b)

@pytest.fixture(scope='module')
def bases(): return [made_raw(n).to_str() for n in KINDS]

# By hand: XTRAIN_FUZZ=10000 pytest tests/test_tokenizer.py -k fuzz
TIMES = int(os.environ.get('XTRAIN_FUZZ', 100))
@pytest.mark.timeout(300 + TIMES)
@settings(max_examples=TIMES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_fuzz_tokenizer_json(bases, tmp_path_factory, data):
    "It works, or one line says why not: no crash, no hang, no heap of memory, nothing written, nothing printed"
    d = tmp_path_factory.getbasetemp()/'fuzz'
    d.mkdir(exist_ok=True)
    (d/'tokenizer.json').write_bytes(b := data.draw(bent(bases)))
    at, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        t = Tokenizer.load(d)
        for s in ("Hello world, 1234 don't é e\u0301 😀\n  x", 'a'*60 + '!', ''):
            ids = t.encode(s)
            assert all(0 <= i < t.vocab_size for i in ids) and t.encode(s) == ids
            t.decode(ids); t.encode(s, special=True); stream(t, ids)
        tokenizer_files(t, Cfg('qwen3')); pre_name(t)
        try: from xtrain.gguf import why_not
        except ImportError: pass
        else: why_not(t)
        try: tokenizer_files(t, Cfg('qwen2'))
        except UserError as e: assert 'transformers 5' in str(e) or 'not a usable' in str(e)
    except UserError as e: assert '\n' not in str(e) and len(str(e)) < 1500
    assert time.process_time()-at < 20 and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 500_000
    assert os.listdir(d) == ['tokenizer.json'] and (d/'tokenizer.json').read_bytes() == b
