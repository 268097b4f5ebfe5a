"Prefill, decode, sampling, batches, streaming: what must hold, and what must be refused"
import json, math, random, sys
import pytest, torch
from xtrain.config import ModelConfig, UserError
from xtrain.generate import KVCache, Sampler, Text, chat, chats, check_prompt, filter_logits, generate, logits_table, pick, prefill, show_table, steps, stream, write
from xtrain.model import TinyTransformer
from xtrain.tokenizer import Tokenizer

SIZES = dict(gqa=dict(n_heads=6, n_kv_heads=2, head_dim=18), mha=dict(n_heads=3, n_kv_heads=3, head_dim=16), mqa=dict(n_heads=4, n_kv_heads=1, head_dim=32, tied=True))
PROMPT = [5, 40, 77, 123, 9, 200]

def make(kind='gqa', attention='composed', seed=0, vocab=300, **kw):
    "A model with weights large enough to have opinions"
    cfg = ModelConfig(vocab_size=vocab, dim=40, n_layers=2, ffn_dim=56, max_seq_len=256, **SIZES[kind], **kw)
    return TinyTransformer(cfg, seed=seed, attention=attention, std=.2)

def some_ids(n, seed=0): return torch.randint(300, (n,), generator=torch.Generator().manual_seed(seed))

@pytest.fixture(scope='module')
def tok(): return Tokenizer.train(['the cat sat on the mat, the cat ran. ' * 5 + 'żółw 👩‍👩‍👧 é'], vocab_size=280)

# --- the cache ---

@pytest.mark.parametrize('kind', SIZES)
@pytest.mark.parametrize('attention', ['composed', 'sdpa'])
def test_cache_is_no_cache(kind, attention):
    "Logits of every step, teacher-forced: one long walk over 64 and 128, then prompts that end around them, read in chunks"
    model, text = make(kind, attention), some_ids(140)
    with torch.no_grad(): ref = model(text[None])[0]
    for n,chunk,new in [(1, None, 139)] + [(n, chunk, 4) for n in (63, 64, 65, 127, 128, 129) for chunk in (None, 7, 64)] + [(65, 1, 2)]:
        kv = KVCache(model.cfg, 1, n+new)
        got = torch.cat([prefill(model, text[None, :n], kv, chunk=chunk)] + [prefill(model, i.view(1, 1), kv) for i in text[n:n+new]])
        want = ref[n-1:n+new]
        assert kv.length == n+new and got.shape == want.shape
        assert (got-want).abs().max() <= 1e-4
        assert torch.equal(got.argmax(-1), want.argmax(-1))

def test_the_cache_in_bfloat16_adds_no_error():
    half, text = make().to(torch.bfloat16), some_ids(140)
    half.dtype = torch.bfloat16
    full = make()
    full.load_state_dict(half.state_dict())
    with torch.no_grad(): ref, plain = full(text[None])[0, 63:], half(text[None])[0, 63:].float()
    kv = KVCache(half.cfg, 1, 140, torch.bfloat16)
    cached = torch.cat([prefill(half, text[None, :64], kv)] + [prefill(half, i.view(1, 1), kv) for i in text[64:]]).float()
    assert kv.k.dtype == torch.bfloat16
    assert 0 < (plain-ref).abs().max() and (cached-ref).abs().max() <= 2*(plain-ref).abs().max()

@pytest.mark.parametrize('kind', SIZES)
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings('ignore:.past_key_values. is deprecated')
def test_cached_decode_has_the_bits_of_transformers(kind, dtype, tmp_path):
    from transformers import AutoModelForCausalLM
    from xtrain.hf import export_hf, import_model
    export_hf(make(kind), None, tmp_path/'m')
    ours = import_model(tmp_path/'m', 'composed', dtype=dtype)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path/'m', dtype=dtype, attn_implementation='eager')
    ids = torch.stack([some_ids(33, s) for s in range(2)])
    kv = KVCache(ours.cfg, 2, 60, dtype)
    with torch.no_grad():
        got, out = prefill(ours, ids, kv), theirs(ids, use_cache=True)
        assert torch.equal(got, out.logits[:, -1])
        for _ in range(24):
            new = got.argmax(-1, keepdim=True)
            got, out = prefill(ours, new, kv), theirs(new, past_key_values=out.past_key_values, use_cache=True)
            assert torch.equal(got, out.logits[:, -1])
    want = theirs.generate(ids[:1], max_new_tokens=20, do_sample=False, pad_token_id=0)[0, 33:].tolist()
    assert generate(ours, [ids[0].tolist()], 20) == [want]

def test_cache_is_preallocated_and_bounded():
    kv = KVCache(make().cfg, 2, 4)
    at = kv.k.data_ptr()
    k = torch.ones(2, 2, 3, 18)
    assert kv.update(1, k, k)[0].data_ptr() == kv.k[1].data_ptr() and kv.k.data_ptr() == at
    kv.advance(3)
    with pytest.raises(UserError, match='room for 4 positions, 6 are needed'): kv.update(1, k, k)
    assert kv.nbytes == 2*4*make().cfg.kv_bytes_per_token(4)

def test_training_goes_on_after_generating():
    model = make()
    generate(model, [PROMPT], 5)
    model.loss(torch.tensor([PROMPT]), torch.tensor([PROMPT])).backward()
    assert model.embed.grad.isfinite().all()

# --- batches ---

@pytest.mark.parametrize('attention', ['composed', 'sdpa'])
@pytest.mark.parametrize('kw', [dict(), dict(temperature=1., seed=3), dict(temperature=.7, top_k=30, top_p=.9, seed=4), dict(chunk=7), dict(cache=False), dict(eos_id=[1, 2, 3, 4, 5, 6, 7, 8, 9, 10])])
def test_a_batch_is_its_prompts_one_at_a_time(attention, kw):
    model = make(attention=attention)
    prompts = [some_ids(n, n).tolist() for n in (65, 1, 17, 3)]
    got = generate(model, prompts, 16, **kw)
    assert got == [generate(model, [p], 16, **kw)[0] for p in prompts]
    assert got[::-1] == generate(model, prompts[::-1], 16, **kw)

def test_padding_holds_nothing_and_costs_only_rounding():
    model, prompts = make(), [some_ids(n, n).tolist() for n in (1, 20, 33)]
    pad = torch.tensor([33-len(p) for p in prompts])
    batch = lambda fill: prefill(model, torch.tensor([[fill]*(33-len(p)) + p for p in prompts]), pad=pad)
    assert torch.equal(batch(0), batch(299))
    assert (batch(0) - torch.cat([prefill(model, torch.tensor([p])) for p in prompts])).abs().max() <= 1e-4

def test_rows_end_one_by_one():
    model = make()
    free = generate(model, [PROMPT, [7], [8, 9]], 30)
    stop = free[0][4]
    out = generate(model, [PROMPT, [7], [8, 9]], 30, eos_id=stop)
    assert out == [f[:f.index(stop)+1] if stop in f else f for f in free] and len(out[0]) <= 5
    assert [None] + free[1][len(out[0]):len(out[0])+1] == list(steps(model, [PROMPT, [7]], 30, eos_id=stop))[len(out[0])]

# --- end of text ---

def test_zero_is_an_id_and_there_may_be_several():
    model = make()
    free = generate(model, [PROMPT], 40)[0]
    with torch.no_grad(): model.embed[0], model.lm_head[:, 0] = model.embed[free[3]].clone(), 50*model.lm_head[:, free[3]]  # now 0 is what comes fourth, or earlier
    out = generate(model, [PROMPT], 40)[0]
    assert 0 in out and len(out) == 40
    assert generate(model, [PROMPT], 40, eos_id=0)[0] == out[:out.index(0)+1]
    assert generate(model, [PROMPT], 40, eos_id=[299, 0])[0] == generate(model, [PROMPT], 40, eos_id=(0,))[0] == out[:out.index(0)+1]
    assert generate(model, [PROMPT], 40, eos_id=None)[0] == out

# --- sampling ---

def test_edges_of_the_settings():
    "F01: greedy at 0 and near it; a top-k that excludes nothing changes nothing"
    model = make()
    run = lambda **kw: generate(model, [PROMPT], 12, **kw)[0]
    greedy = run()
    for kw in (dict(temperature=0), dict(temperature=1e-8), dict(temperature=5e-324), dict(temperature=1, top_k=1), dict(temperature=1e4, top_k=1), dict(temperature=1e4, top_p=0)): assert run(**kw) == greedy, kw
    assert run(temperature=1e-4) == greedy
    warm = run(temperature=1e4, seed=5)
    assert warm != greedy and all(0 <= i < 300 for i in warm)
    for k in (0, 300, 301, 10**9): assert run(temperature=1e4, seed=5, top_k=k) == warm
    assert run(temperature=1e4, seed=5, top_p=1) == run(temperature=1e4, seed=5, top_p=1.) == warm
    assert run(temperature=1e4, seed=5, top_k=299) != [] and run(temperature=1e4, seed=6) != warm

@pytest.mark.parametrize('kw, why', [
    (dict(temperature=-1), 'temperature must be 0 .* or a positive number, got -1'), (dict(temperature=math.nan), 'temperature.* got nan'), (dict(temperature=math.inf), 'temperature'), (dict(temperature='1'), 'temperature'), (dict(temperature=True), 'temperature'),
    (dict(top_p=1.5), 'top_p must be between 0 .* and 1 .* got 1.5'), (dict(top_p=-.1), 'top_p'), (dict(top_p=math.nan), 'top_p'), (dict(top_k=-1), 'top_k must be 0'), (dict(top_k=2.5), 'top_k'), (dict(top_k=math.nan), 'top_k'),
    (dict(seed=-1), 'seed'), (dict(seed=1.5), 'seed'), (dict(seed=[1, 2]), '2 seeds for 1 prompts'), (dict(max_tokens=-1), 'max_tokens'), (dict(max_tokens=1.5), 'max_tokens')])
def test_settings_that_mean_nothing_are_refused(kw, why):
    with pytest.raises(UserError, match=why) as e: generate(make(), [PROMPT], **kw)
    assert '\n' not in str(e.value)

def test_a_seed_is_a_sample():
    model = make()
    run = lambda prompts, seed: generate(model, prompts, 16, temperature=1.5, seed=seed)
    a = run([PROMPT], 1)[0]
    assert run([PROMPT], 1)[0] == a != run([PROMPT], 2)[0]
    torch.manual_seed(99); torch.rand(3)
    before = torch.get_rng_state()
    assert run([[4], PROMPT, PROMPT], [7, 1, 2]) == [run([[4]], 7)[0], a, run([PROMPT], 2)[0]]
    assert torch.equal(before, torch.get_rng_state())   # nobody else's random numbers are used

def test_filter_keeps_what_it_says():
    x = torch.tensor([[.1, .5, .15, .25]], dtype=torch.double).log()
    kept = lambda x, **kw: filter_logits(x, **kw).isfinite().nonzero()[:, 1].tolist()
    assert [kept(x, top_k=k) for k in (1, 2, 3, 4)] == [[1], [1, 3], [1, 2, 3], [0, 1, 2, 3]]
    assert [kept(x, top_p=p) for p in (0., .49, .51, .76, .95, 1.)] == [[1], [1], [1, 3], [1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert kept(x, top_k=2, top_p=.66) == [1] and kept(x, top_k=2, top_p=.67) == [1, 3]
    assert kept(torch.zeros(1, 6), top_k=2) == [0, 1] and kept(torch.zeros(1, 4, dtype=torch.double), top_p=.5) == [0, 1]
    assert torch.equal(filter_logits(x, top_k=2)[0, [1, 3]], x[0, [1, 3]])   # what stays is not changed

def test_filter_is_transformers_filter():
    from transformers import TopKLogitsWarper, TopPLogitsWarper
    x = torch.randn(20, 97, dtype=torch.double, generator=torch.Generator().manual_seed(0))*3
    for k,p in ((5, .8), (50, .3), (97, .95), (3, .999)):
        assert torch.equal(filter_logits(x, k, p), TopPLogitsWarper(p)(None, TopKLogitsWarper(k)(None, x)))

@pytest.mark.parametrize('kw', [dict(), dict(temperature=2.), dict(temperature=.5, top_k=5), dict(temperature=1., top_p=.8)])
def test_draws_have_the_probabilities(kw):
    "Chi squared against the exact distribution; a right sampler fails once in 10,000"
    n, x = 20_000, torch.tensor([2., 1.5, 1.2, .4, 0., -.5, -1., -3.], dtype=torch.double)
    p = filter_logits(x[None]/kw.get('temperature', 1), **{k: v for k,v in kw.items() if k != 'temperature'})[0].softmax(-1)
    got = Sampler(n, **(dict(temperature=1.) | kw), seed=list(range(n)))(x.expand(n, 8).float()).bincount(minlength=8)
    assert not got[p == 0].any()
    live = p > 0
    assert ((got-n*p)[live]**2/(n*p)[live]).sum() < {7: 29.9, 4: 23.5, 3: 21.1, 2: 18.4}[live.sum().item()-1]

def test_pick_is_the_inverse_of_the_cumulative_distribution():
    x = torch.tensor([[-math.inf, 0., -math.inf, 0., -math.inf]], dtype=torch.double)
    assert [pick(x, torch.tensor([u], dtype=torch.double)).item() for u in (0., .25, .4999, .5, .75, 1-2**-53)] == [1, 1, 1, 3, 3, 3]

def test_broken_weights_are_said_to_be_broken():
    model = make()
    with torch.no_grad(): model.final_norm[0] = math.nan
    for kw in (dict(), dict(temperature=1.)):
        with pytest.raises(UserError, match='not finite'): generate(model, [PROMPT], 3, **kw)

# --- prompts ---

@pytest.mark.parametrize('n, new, ok', [(1, 0, 1), (1, 50, 1), (1, 255, 1), (1, 256, 0), (255, 0, 1), (255, 1, 1), (255, 50, 0), (256, 0, 1), (256, 1, 0), (257, 0, 0), (1000, 0, 0), (1000, 50, 0)])
def test_the_context_is_a_border(n, new, ok):
    "F03: context 256"
    model, prompt = make(), some_ids(n).tolist()
    if ok: assert len(generate(model, [prompt], new)[0]) == new
    else:
        with pytest.raises(UserError, match=f'prompt {n} \\+ new {new} = {n+new} tokens; the context of this model is 256'): generate(model, [prompt], new)

def test_empty_prompts_begin_with_the_end_of_text_or_are_refused():
    model = make()
    assert generate(model, [[]], 5, eos_id=[0, 7]) == generate(model, [[0]], 5, eos_id=[0, 7])
    assert generate(model, [[], PROMPT], 5, eos_id=0)[1] == generate(model, [PROMPT], 5, eos_id=0)[0]
    with pytest.raises(UserError, match='prompt is empty'): generate(model, [[]], 5)
    with pytest.raises(UserError, match='prompt is empty'): generate(model, [[]], 0)
    assert generate(model, [PROMPT], 0) == [[]] and generate(model, [], 5) == []

@pytest.mark.parametrize('bad', [-1, 300, 1.5, '5', None, True])
def test_ids_the_model_does_not_know_are_refused(bad):
    with pytest.raises(UserError, match='the model knows 0 to 299'): check_prompt(make().cfg, [1, bad])

def test_padded_rows_can_be_picked_and_decode_to_nothing(tok):
    "C09: embedding rows beyond the tokenizer are rows like any other"
    model = make(vocab=tok.vocab_size+20)
    with torch.no_grad(): model.lm_head[:, -20:] *= 20
    out = generate(model, [[1, 2, 3]], 20)[0]
    assert any(i >= tok.vocab_size for i in out) and isinstance(tok.decode(out), str)
    row = next(r for r in logits_table(model, tok, [1, 2, 3], 50) if r['id'] >= tok.vocab_size)
    assert row['token'] == ''
    assert ''.join(stream(model, tok, 'the', 20, temperature=1.)) == tok.decode(generate(model, [tok.encode('the')], 20, temperature=1., eos_id=tok.stop_ids)[0])

# --- text ---

@pytest.fixture(scope='module')
def teller(tok):
    "A model that has one text by heart"
    text = 'the cat sat on the mat, the cat ran. żółw 👩‍👩‍👧 é'
    ids = torch.tensor([[tok.eos_id] + tok.encode(text) + [tok.eos_id]])
    torch.manual_seed(0)
    model = TinyTransformer(ModelConfig(tok.vocab_size, 48, 2, 4, 2, 12, 96, max_seq_len=256), seed=0)
    opt = torch.optim.AdamW(model.params().values(), lr=5e-3)
    for _ in range(150): opt.zero_grad(); loss = model.loss(ids[:, :-1], ids[:, 1:]); loss.backward(); opt.step()
    assert loss < .05
    return model, text

def test_stream_is_the_text(tok, teller):
    model, text = teller
    parts = list(stream(model, tok, 'the cat sat', 200))
    assert ''.join(parts) == text[11:] and len(parts) > 10 and all(parts)
    assert not any('\ufffd' in p for p in parts)
    assert ''.join(stream(model, tok, '', 200)) == text     # from the end-of-text token
    assert list(stream(model, tok, 'the cat sat', 0)) == []

def test_a_cut_character_is_one_mark(tok, teller):
    model, text = teller
    n = len(tok.encode(text))
    for k in range(n-len(tok.encode('the'))+1):
        got = ''.join(stream(model, tok, 'the', k))
        assert got == tok.decode(tok.encode(text)[len(tok.encode('the')):][:k]) and got.count('\ufffd') <= 1

@pytest.mark.parametrize('stop, end', [(['mat'], ' on the '), (['zebra', 'mat, '], ' on the '), (['t, the c'], ' on the ma'), (['mat!', 'the mat?'], None), (['on', ' on'], ''), ([''], None), (['ran', 'cat'], ' on the mat, the '), (['👩‍👧'], None)])
def test_stop_strings(tok, teller, stop, end):
    model, text = teller
    rest = text[text.index(' on'):]
    if end is None: end = rest[:min([rest.index(s) for s in stop if s and s in rest], default=None)]
    got = list(stream(model, tok, 'the cat sat', 200, stop=stop))
    assert ''.join(got) == end

def test_a_stop_string_holds_back_no_more_than_it_must(tok, teller):
    model, _ = teller
    plain, held = list(stream(model, tok, 'the cat sat', 20)), list(stream(model, tok, 'the cat sat', 20, stop=['####']))
    assert plain == held

NASTY = ['plain', 'e\u0301a\u0301', '👩‍👩‍👧‍👦 family', '日本語 텍스트 ไทย', '\ufffd is a character too', 'a\x00b', '🇵🇱🇩🇪', 'x'*50, '\r\n\t ', 'ﷺ𝔘', '<|endoftext|>', '']

@pytest.mark.parametrize('text', NASTY)
def test_text_comes_whole_however_it_is_cut(tok, text):
    "F02: joined it is the decode of all, after every number of tokens; a mark only for a character that is really cut"
    ids = tok.encode(text)
    for n in range(len(ids)+1):
        t = Text(tok)
        parts = [t.push(i) for i in ids[:n]]
        before = ''.join(parts)
        parts.append(t.flush())
        assert ''.join(parts) == t.text == tok.decode(ids[:n]) and t.why == 'length' and t.ids == ids[:n]
        assert text.startswith(before) and t.text.count('\ufffd') <= text.count('\ufffd')+1

def test_a_stop_string_is_found_wherever_tokens_cut_it(tok):
    "Against the definition: all before the earliest stop string of the whole text, never a piece of it, nothing twice"
    rng = random.Random(0)
    for _ in range(400):
        text = ''.join(rng.choice(['ab', 'aab', 'the cat', 'é', '👩‍👧', ' ']) for _ in range(12))
        stop = [''.join(rng.choice('ab é👩t') for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(0, 3))]
        t, ends = Text(tok, stop), []
        shown = ''
        for i in tok.encode(text):
            shown += t.push(i)
            assert not any(x in shown for x in stop)
            first = next((n for n in range(len(t.text)+1) if any(t.text.startswith(x, n) for x in stop)), None)
            assert t.why == 'stop' or first is None
            if t.why: break
        shown += t.flush()
        cuts = [text.index(x) for x in stop if x in text]
        # the text as it stood when the first stop string was complete
        done = min((text.index(x)+len(x) for x in stop if x in text), default=None)
        want = text if done is None else text[:min(c for c, x in ((text.index(x), x) for x in stop if x in text) if c+len(x) == done or c < done)]
        assert shown == t.text and (shown == want or len(tok.encode(text[:done])) != len([*tok.encode(text)]) and text.startswith(shown) and len(shown) in cuts)
        assert t.push(5) == t.flush() == ''

def test_stop_strings_must_be_text(tok):
    with pytest.raises(UserError, match='stop string must be text, got 5'): Text(tok, [5])
    assert Text(tok, 'mat').stop == ['mat'] and Text(tok, ['', 'a']).stop == ['a']

def test_write_is_stream_for_each(tok, teller):
    "A batch with stop strings and ends of text: each row as if it were alone, pieces in order, and no step after the last has ended"
    model, text = teller
    prompts = ['the cat sat', '', 'the cat sat on the mat, the', 'the']
    for kw in (dict(), dict(stop=['mat', 'ż']), dict(stop=['ran']), dict(temperature=1., seed=[1, 2, 3, 4])):
        pieces = [''] * 4
        def show(i, new): pieces[i] += new
        got = write(model, tok, prompts, 60, show=show, **kw)
        one = [dict(kw, seed=kw['seed'][i]) if 'seed' in kw else kw for i in range(4)]
        assert [t.text for t in got] == pieces == [''.join(stream(model, tok, p, 60, **k)) for p,k in zip(prompts, one)]
        assert all(t.why in ('eos', 'stop', 'length') for t in got)
    n, inner = [], model.hidden
    model.hidden = lambda *a, **k: n.append(1) or inner(*a, **k)
    try: assert write(model, tok, ['the cat sat'], 60, stop=[' on'])[0].text == '' and len(n) < 10
    finally: del model.hidden

def test_random_numbers_come_in_one_order():
    "Drawn one by one or many at once: a graph that needs them in advance writes the same text"
    one, many = Sampler(3, 1., seed=[5, 6, 7]), Sampler(3, 1., seed=[5, 6, 7])
    assert torch.equal(torch.cat([one.uniform(1) for _ in range(40)], 1), torch.cat([many.uniform(1), many.uniform(0), many.uniform(39)], 1))

# --- chat ---

CHATML = """{%- if messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role != 'system' %}
        {{- raise_exception('who is ' + message.role + '?') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
MARKS = "{{ bos_token }}{% for m in messages %}[{{ m['role'] | upper }}] {{ m['content'] | trim }}{{ eos_token }}\n{% endfor %}{{ {'b': 1, 'a': 'é'} | tojson }}"
TALK = [dict(role='system', content='Be brief.'), dict(role='user', content='Hé <|im_end|> {{ 7*7 }}'), dict(role='assistant', content='<think>hm</think>\n\nYes.'), dict(role='user', content=' why? ')]

@pytest.mark.parametrize('where', ['jinja', 'config', 'named', 'both'])
@pytest.mark.parametrize('template', [CHATML, MARKS], ids=['chatml', 'marks'])
def test_chat_is_transformers_chat(tok, tmp_path, where, template):
    from transformers import AutoTokenizer
    tok.save(tmp_path)
    config = dict(tokenizer_class='PreTrainedTokenizerFast', bos_token=dict(content='<s>', __type='AddedToken', lstrip=False, rstrip=False, normalized=False, single_word=False, special=True), eos_token='<|endoftext|>')
    if where == 'config': config['chat_template'] = template
    if where == 'named': config['chat_template'] = [dict(name='tool_use', template='no'), dict(name='default', template=template)]
    if where == 'both': config['chat_template'] = 'the file beside it counts'
    (tmp_path/'tokenizer_config.json').write_text(json.dumps(config))
    if where in ('jinja', 'both'): (tmp_path/'chat_template.jinja').write_text(template)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for talk in (TALK, TALK[1:], TALK[:2]):
        for kw in (dict(), dict(enable_thinking=False)):
            assert chat(tmp_path, talk, **kw) == theirs.apply_chat_template(talk, tokenize=False, add_generation_prompt=True, **kw)
    assert '49' not in chat(tmp_path, TALK)     # what a user says is no program
    assert chats(tmp_path, [TALK, TALK[1:]], enable_thinking=False) == [chat(tmp_path, t, enable_thinking=False) for t in (TALK, TALK[1:])] and chats(tmp_path, []) == []

@pytest.mark.parametrize('template', [CHATML, MARKS], ids=['chatml', 'marks'])
def test_a_run_chats_as_its_export_does(tok, tmp_path, template):
    "BOS and EOS of the template, in a run, in its checkpoint, and in an imported run, whose serving.json has the BOS"
    from xtrain.checkpoint import new_run
    from xtrain.export import export_weights
    from xtrain.hf import import_to_run, load_any
    t = Tokenizer(tok.json, tok.eos_token); t.chat_template = template
    m = TinyTransformer(ModelConfig(vocab_size=tok.vocab_size, dim=8, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=4, ffn_dim=8, max_seq_len=64))
    run = new_run(tmp_path/'run', m.cfg, m.params().__getitem__, t, data=dict(eos_id=t.eos_id))
    export_weights(m.cfg, m.params().__getitem__, load_any(run)[1], tmp_path/'hf')
    want = chat(tmp_path/'hf', TALK)
    assert ('<|endoftext|>' in want) == (template is MARKS) and chat(run, TALK) == want == chat(run/'checkpoints/step-00000000', TALK)
    c = json.loads((f := tmp_path/'hf/tokenizer_config.json').read_text()); c['bos_token'] = '<|endoftext|>'; f.write_text(json.dumps(c))
    import_to_run(tmp_path/'hf', tmp_path/'again')
    assert chat(tmp_path/'again', TALK) == chat(tmp_path/'hf', TALK)
    for text in ('{', '[]', '{"tokenizer_config.json": 5}'):
        (tmp_path/'again/serving.json').write_text(text)
        with pytest.raises(UserError, match='serving.json: cannot be read'): chat(tmp_path/'again', TALK)

def test_a_template_that_cannot_be_used_is_refused(tmp_path, monkeypatch):
    def says(why, talk=TALK):
        with pytest.raises(UserError, match=why) as e: chat(tmp_path, talk)
        assert '\n' not in str(e.value)
    says('has no chat template: neither chat_template.jinja nor')
    for text in ('{"chat_template": 5}', '{}', '{"chat_template": [{"name": "x"}]}'):
        (tmp_path/'tokenizer_config.json').write_text(text); says('has no chat template')
    for text in ('{', '[]', '"x"', '['*100_000): (tmp_path/'tokenizer_config.json').write_text(text); says('tokenizer_config.json: cannot be read')
    (tmp_path/'tokenizer_config.json').write_bytes(b'\xff\xfe'); says('cannot be read')
    (tmp_path/'tokenizer_config.json').unlink()
    f = tmp_path/'chat_template.jinja'
    for text, why in (('{% if %}', 'TemplateSyntaxError'), ('{{ messages[9].content }}', 'UndefinedError'), ("{{ ''.__class__.__mro__ }}", 'SecurityError.*unsafe'), ("{{ raise_exception('no tools') }}", 'no tools'),
                      ('{{ messages.append(1) }}', 'SecurityError'), ('{% for i in range(10**9) %}{% endfor %}', 'OverflowError'), ("{% include 'x' %}", 'TypeError|TemplateNotFound|no loader'), ('{{ 1/0 }}', 'ZeroDivisionError')):
        f.write_text(text); says(f'does not take this conversation: .*({why})')
    f.write_text(CHATML); says('who is wizard', [dict(role='wizard', content='x')])
    with pytest.raises(UserError, match='nowhere does not exist'): chat(tmp_path/'nowhere', [])
    monkeypatch.setitem(sys.modules, 'jinja2', None)
    says('needs jinja2; pip install jinja2')

def test_logits_table(tok, teller):
    model, _ = teller
    rows = logits_table(model, tok, 'the cat')
    x = prefill(model, torch.tensor([tok.encode('the cat')]))[0]
    assert [r['rank'] for r in rows] == list(range(11)) and list(rows[0]) == ['rank', 'logit', 'logprob', 'token', 'id']
    assert [r['logit'] for r in rows] == x.sort(descending=True).values[:11].tolist() and [x[r['id']].item() for r in rows] == [r['logit'] for r in rows]
    assert all(tok.decode([r['id']]) == r['token'] for r in rows)
    assert logits_table(model, tok, tok.encode('the cat')) == rows
    assert abs(sum(math.exp(r['logprob']) for r in logits_table(model, tok, 'the cat', 10**9)) - 1) < 1e-12
    assert len(logits_table(model, tok, 'the cat', 10**9)) == tok.vocab_size
    lines = show_table(rows).splitlines()
    assert lines[0].split() == ['rank', 'logit', 'probability', 'token', 'id'] and len(lines) == 13 and f'{rows[0]["logit"]:.4f}' in lines[2]
    for bad in (0, -1, 1.5, None):
        with pytest.raises(UserError, match='top must be'): logits_table(model, tok, 'the cat', bad)

def test_equal_logits_are_listed_by_id(tok):
    model = make(vocab=tok.vocab_size)
    with torch.no_grad(): model.lm_head.zero_()
    assert [r['id'] for r in logits_table(model, tok, 'the', 5)] == [0, 1, 2, 3, 4]
    assert generate(model, [[1]], 3) == [[0, 0, 0]]


# --- the decode kernels and the card -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('kib, head_dim, dtype, fits', [(228, 128, torch.float32, True), (100, 128, torch.bfloat16, True), (100, 128, torch.float32, False), (164, 256, torch.bfloat16, False), (228, 256, torch.bfloat16, True)])
def test_a_card_with_too_little_shared_memory_is_told_so(monkeypatch, kib, head_dim, dtype, fits):
    "Instead of a launch that fails: an RTX 5090 has 100 KiB a multiprocessor, an A100 164, an H200 228; 1 of them is the system's"
    from types import SimpleNamespace as NS
    import xtrain.decode as module
    import xtrain.kernels as k
    ops = k.load_source(k.csrc_path()/'decode.cu', gpu=False)                    # says what its launches ask for
    monkeypatch.setattr(torch.cuda, 'get_device_properties', lambda i: NS(shared_memory_per_multiprocessor=kib<<10))
    monkeypatch.setattr(module, 'kernels', lambda *a: ops)
    model = NS(cfg=NS(n_heads=16, n_kv_heads=4, head_dim=head_dim, dim=1024, ffn_dim=3072), embed=NS(is_cuda=True, get_device=lambda: 0), dtype=dtype, attention='auto')
    why = module.why_not(model)
    assert why is None if fits else 'shared memory' in why and f'{kib-1} KiB' in why
    assert (ops.attend_shared(4, head_dim, dtype.itemsize)+512 <= (kib-1)<<10) == fits

@pytest.mark.parametrize('cap, rows, dim, head_dim, dtype, yes', [((9, 0), 5, 1024, 128, torch.bfloat16, True), ((9, 0), 6, 1024, 128, torch.bfloat16, False), ((8, 0), 1, 1024, 128, torch.bfloat16, False),
    ((12, 0), 1, 1024, 128, torch.bfloat16, False), ((9, 0), 5, 16384, 128, torch.bfloat16, False), ((9, 0), 1, 16384, 128, torch.bfloat16, True), ((9, 0), 1, 1024, 256, torch.bfloat16, False), ((9, 0), 1, 1024, 128, torch.float32, False)])
def test_one_kernel_for_a_step_only_where_it_has_room(monkeypatch, cap, rows, dim, head_dim, dtype, yes):
    "Else the chain: on other cards, for more rows, for a model too wide for the shared memory of a block"
    from contextlib import nullcontext
    from types import SimpleNamespace as NS
    import xtrain.decode as module, xtrain.kernels as k
    ops = k.load_source(k.csrc_path()/'decode_whole.cu', gpu=False)
    there = NS(whole_shared=lambda *a: ops.whole_shared(*a[:-1], a[-1] or 227<<10)) # 0: as much as the card has
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda d: cap)
    monkeypatch.setattr(torch.cuda, 'device', lambda d: nullcontext())
    cfg = NS(n_heads=16, n_kv_heads=8, head_dim=head_dim, dim=dim, ffn_dim=3072, n_layers=28)
    for kernels,want in ((there, there if yes else None), (None, None)):
        monkeypatch.setattr(module, 'kernels', lambda *a: kernels)
        assert module._whole(cfg, rows, dtype, torch.device('cuda', 0)) is want
