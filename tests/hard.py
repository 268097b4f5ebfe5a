"Texts that are hard to tokenise, tokenizers of many kinds trained on them, and llama.cpp to ask"
import json, random, urllib.request
from functools import cache
from tokenizers import AddedToken, Regex, Tokenizer as Raw, decoders as D, models, normalizers as N, pre_tokenizers as P, processors, trainers
from xtrain.stories import Stories
from xtrain.tokenizer import LLAMA3_SPLIT, QWEN2_SPLIT, Tokenizer, byte_chars

WORDS = [ # One of each trouble
    '', '\0', ' ', '  leading two', 'trailing  ', 'tab\tand\nnewline\r\n', '\n\n\n\n', '\r', '\r\n\r\n', 'a\r\n\r\nb\r\rc \n \n  d\t\t e   f', '  \n\n  x', 'x   ', ' '*130 + 'x', ' \u00a0\u2003\u3000', 'a\u0085b', 'end.\u2028next\u2029',
    "don't I'll we'RE", "I'm you're we'LL THEY'VE it'S o'clock 'tis don''t", "'ſ 'ſſ 'K", "'"*9, " n't 's I 'm", '1234567890 3.14159 1,000,000', '１２３ ٣٤٥ ½ Ⅷ ²', '1'*50, '𝕳𝖊𝖑𝖑𝖔 𝟘𝟙',
    'café vs cafe\u0301', 'e\u0301\u0327', '\u1e9b\u0323 \uac00 \u1100\u1161', 'ﬁ ﬀ ① ㎏ Ａｂｃ', 'ß ẞ İ ı ǅ ǈ', '你好，世界', 'مرحبا بالعالم', 'สวัสดี', 'नमस्ते दुनिया', '안녕하세요 세계', 'עברית',
    '😀👍🏽', '👨‍👩‍👧', '🏳️‍🌈', '❤️', '👩🏽‍🚀👨‍👩‍👧‍👦', '🇩🇪🇪', '\ufeffBOM inside', '\u200bzero width', '\u00ad\u200c\u200d\u2060', '\ud7ff\ue000\uffff\ufffd', '\x01\x02\x7f',
    '<|endoftext|>', '<|im_start|>user', 'a<|im_end|>b <|im_end|> c', '<|endoftext|><|endoftext|> x', '<think>hm</think>', '<s></s><unk><pad>', '[CLS] [SEP] [PAD300] [MASK]', '<0x41>', '▁a ▁▁', 'ĠaĊbč Ą ā',
    '    def f(x):\n        return x\n', '--- *** ### ```py', '{"a": [1, 2.5e-3, null]}', 'http://a.b/c?d=e&f#g', '...!!!???', ' , .', 'a'*300]

def hard(n=120):
    "`WORDS` and `n` texts at random: characters of many scripts, and bytes of any kind"
    rng = random.Random(0)
    blocks = [(32, 127), (0xa0, 0x250), (0x370, 0x600), (0x900, 0xe00), (0x2000, 0x2100), (0x4e00, 0x9fff), (0x1f300, 0x1f700), (9, 14), (32, 33), (39, 40)]
    texts = [''.join(chr(rng.randrange(*rng.choice(blocks))) for _ in range(rng.randrange(1, 60))) for _ in range(n//2)]
    return [*WORDS, *texts, *(rng.randbytes(rng.randrange(1, 60)).decode('utf-8', 'replace') for _ in range(n//2))]

def corpus():
    yield from (Stories(1).story(i).text for i in range(150))
    yield from hard()*2

def byte_level(regex=True, space=False): return P.ByteLevel(add_prefix_space=space, trim_offsets=False, use_regex=regex)
def split(pattern): return P.Sequence([P.Split(Regex(pattern), 'isolated'), byte_level(False)])

def bpe(pre, norm=None, special=('<|endoftext|>', '<|im_start|>', '<|im_end|>'), **kw):
    raw = Raw(models.BPE(**kw))
    raw.pre_tokenizer, raw.decoder = pre, D.ByteLevel()
    if norm: raw.normalizer = norm
    raw.train_from_iterator(corpus(), trainers.BpeTrainer(vocab_size=800, special_tokens=list(special), show_progress=False, initial_alphabet=sorted(byte_chars())))
    return raw

def _qwen2():
    raw = bpe(split(QWEN2_SPLIT), N.NFC())
    raw.add_tokens([AddedToken(t, special=False, normalized=False) for t in ('<think>', '</think>')])
    raw.post_processor = processors.ByteLevel(trim_offsets=False)
    return raw

def _llama3():
    raw = bpe(split(LLAMA3_SPLIT), special=('<|begin_of_text|>', '<|end_of_text|>', '<|eot_id|>'), ignore_merges=True)
    begin = processors.TemplateProcessing(single='<|begin_of_text|> $A', pair='<|begin_of_text|> $A <|begin_of_text|>:1 $B:1', special_tokens=[('<|begin_of_text|>', 0)])
    raw.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), begin])
    return raw

def _llama2():
    raw = Raw(models.BPE(byte_fallback=True, unk_token='<unk>', fuse_unk=True))
    raw.normalizer = N.Sequence([N.Prepend('▁'), N.Replace(' ', '▁')])
    raw.decoder = D.Sequence([D.Replace('▁', ' '), D.ByteFallback(), D.Fuse(), D.Strip(' ', 1, 0)])
    raw.train_from_iterator((t for t in corpus() if len(t) < 200), trainers.BpeTrainer(vocab_size=1400, special_tokens=['<unk>', '<s>', '</s>', *(f'<0x{i:02X}>' for i in range(256))], show_progress=False, max_token_length=12))
    raw.post_processor = processors.TemplateProcessing(single='<s> $A', pair='<s> $A <s>:1 $B:1', special_tokens=[('<s>', 1)])
    return raw

def _bert():
    names = ['[UNK]', '[PAD]', '[CLS]', '[SEP]', '[MASK]', 'the', '##s', 'a', 'b', '.', "'", 's', 'x', '##b', '##c']
    raw = Raw(models.WordPiece({t: i for i,t in enumerate(names)}, unk_token='[UNK]'))
    raw.normalizer, raw.pre_tokenizer, raw.decoder = N.BertNormalizer(), P.BertPreTokenizer(), D.WordPiece()
    raw.add_special_tokens(names[:5])
    raw.post_processor = processors.TemplateProcessing(single='[CLS] $A [SEP]', pair='[CLS] $A [SEP] $B [SEP]', special_tokens=[('[CLS]', 2), ('[SEP]', 3)])
    return raw

def _unigram():
    raw = Raw(models.Unigram([('<unk>', 0.), ('</s>', 0.), ('▁', -2.), ('▁the', -3.), ('e', -4.), ('a', -4.), ('s', -4.5), ('▁a', -5.)], unk_id=0))
    raw.pre_tokenizer, raw.decoder = P.Metaspace(), D.Metaspace()
    raw.add_special_tokens(['</s>'])
    return raw

def _odd():
    raw = bpe(byte_level())
    raw.add_special_tokens([AddedToken('<|strip|>', lstrip=True, rstrip=True, special=True)])
    raw.add_tokens([AddedToken('otter', single_word=True)])
    return raw

KINDS = { # name: (makes it, EOS, llama.cpp's name)
    'ours': (lambda: Raw.from_str(Tokenizer.train(corpus(), 800, special=['<|im_end|>']).json), '<|endoftext|>', 'qwen2'),
    'gpt2': (lambda: bpe(byte_level()), '<|endoftext|>', 'gpt-2'),
    'llama3': (_llama3, '<|end_of_text|>', 'llama-bpe'),
    'dbrx': (lambda: bpe(split(LLAMA3_SPLIT)), '<|endoftext|>', 'dbrx'),
    'smollm': (lambda: bpe(P.Sequence([P.Digits(individual_digits=True), byte_level()])), '<|endoftext|>', 'smollm'),
    'think': (lambda: (lambda r: [r.add_tokens([AddedToken('<think>', special=False, normalized=False)]), r][1])(bpe(split(QWEN2_SPLIT))), '<|im_end|>', 'qwen2'),
    'qwen2': (_qwen2, '<|im_end|>', None), # NFC
    'prefix': (lambda: bpe(byte_level(space=True)), '<|endoftext|>', None),
    'llama2': (_llama2, '</s>', None), 'bert': (_bert, '[SEP]', None), 'unigram': (_unigram, '</s>', None), 'odd': (_odd, '<|endoftext|>', None),
}

@cache
def _text(name): return KINDS[name][0]().to_str()

def made_raw(name):
    "The tokenizer of that kind, as the tokenizers library has it"
    return Raw.from_str(_text(name))

class Llama:
    "llama.cpp with a GGUF file loaded, in float32 throughout"
    def __init__(self, path):
        import xllamacpp as xl
        p = xl.CommonParams()
        p.model.path, p.n_parallel, p.warmup, p.verbosity = str(path), 1, False, -1
        p.cpuparams.n_threads = p.cpuparams_batch.n_threads = 1
        p.cache_type_k = p.cache_type_v = xl.ggml_type.GGML_TYPE_F32
        p.flash_attn_type = xl.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.server = xl.Server(p)
    def ask(self, what, **d):
        r = urllib.request.Request(f'{self.server.listening_address}/{what}', json.dumps(d).encode(), {'Content-Type':'application/json'})
        with urllib.request.urlopen(r) as f: return json.load(f)
    def encode(self, text, special=False): return self.ask('tokenize', content=text, add_special=True, parse_special=special)['tokens']
    def decode(self, ids): return self.ask('detokenize', tokens=ids)['content']
    def complete(self, ids, n, **kw): return self.ask('completion', **(dict(prompt=ids, n_predict=n, temperature=0, return_tokens=True, cache_prompt=False) | kw))
    def greedy(self, ids, n, eos=0):
        "Up to and with the EOS (`ignore_eos` would forbid it, not pass over it)"
        r = self.complete(ids, n)
        return [i for i in r['tokens'] if i != eos] + [eos]*(r['stop_type'] == 'eos')
