"Data: every kind of source and of dirt, exact borders, reuse by content, order and coverage of batches."
import codecs, gzip, json, os, re, subprocess, sys, time, tracemalloc
from pathlib import Path
import numpy as np, pytest, torch
from xtrain import data as D
from xtrain.config import UserError
from xtrain.data import Batches, TokenData, eval_batches, find_files, fingerprint, held_out, permute, prepare, read_documents
from xtrain.stories import Stories
from xtrain.tokenizer import Tokenizer

BYTES = Tokenizer.train([], 257)
EOS = '<|endoftext|>'

def write(path, data):
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path

def docs(path, **kw): return list(read_documents(path, **kw))

def tokens(dir, split='train'):
    t = TokenData(dir, split)
    return t.gather([0], len(t))[0].tolist() if len(t) else []

def rows(n, **kw): return ''.join(json.dumps(dict(text=f'Document {i} of many.', **kw))+'\n' for i in range(n))

# Sources

def test_files_come_in_order_and_hidden_ones_do_not(tmp_path):
    for n in ('b.txt', 'a.txt.gz', 'C.JSONL', 'sub/0.txt', '.x.txt', 'sub/.git/y.txt', 'notes.md', 'c.parquet.bak'):
        (tmp_path/n).parent.mkdir(exist_ok=True, parents=True); (tmp_path/n).touch()
    assert [p.relative_to(tmp_path).as_posix() for p in find_files(tmp_path)] == ['C.JSONL', 'a.txt.gz', 'b.txt', 'sub/0.txt']
    assert [p.name for p in find_files(str(tmp_path/'*.txt*'))] == ['a.txt.gz', 'b.txt']
    assert [p.name for p in find_files(str(tmp_path/'**'/'*.txt'))] == ['b.txt', '0.txt']
    assert find_files(tmp_path/'notes.md') == [tmp_path/'notes.md']              # named by itself, a file is text whatever its name
    write(tmp_path/'a[1].txt', 'x'); assert [p.name for p in find_files(tmp_path/'a[1].txt')] == ['a[1].txt']

@pytest.mark.parametrize('name,why', [('no.txt', 'no such file'), ('*.csv', 'no file matches'), ('empty', r'no \.txt, \.jsonl, \.parquet'), ('pipe', 'neither a file nor')])
def test_sources_that_are_not_there(tmp_path, name, why):
    (tmp_path/'empty').mkdir(); os.mkfifo(tmp_path/'pipe')
    with pytest.raises(UserError, match=why) as e: docs(tmp_path/name)
    assert name in str(e.value) and '\n' not in str(e.value)

def test_a_text_file_is_one_document_unless_parted(tmp_path):
    f = write(tmp_path/'a.txt', f'One.\n{EOS}\nTwo {EOS}Three.\r\n{EOS}\r\n\n{EOS}\n')
    assert docs(f) == [f.read_bytes().decode()]
    assert docs(f, separator=EOS) == ['One.', 'Two ', 'Three.']

@pytest.mark.parametrize('chunk', [1, 2, 3, 7, 64])
def test_chunks_do_not_show(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(D, 'CHUNK', chunk)
    text = f'\ufeffÜber 世界\r\n\n{EOS}\r\nword  and word😀 \n{EOS}{EOS}\nlast one here ok'
    f = write(tmp_path/'a.txt', text)
    monkeypatch.setattr(D, 'CHUNK', 1<<20); want = docs(f, separator=EOS), docs(f)
    monkeypatch.setattr(D, 'CHUNK', chunk)
    assert (docs(f, separator=EOS), docs(f)) == want
    assert want[0] == ['Über 世界\r\n', 'word  and word😀 ', 'last one here ok']

def test_pieces_of_a_large_document_change_no_token(tmp_path, monkeypatch):
    text = '  Two words,\n\nand  3 more... don\'t \t stop\r\n. a b c\n'*400 + 'x'*3000 + ' y'*900
    f = write(tmp_path/'a.txt', text)
    tok = Tokenizer.train([text[:5000]], 400)
    whole = tok.encode(text)
    monkeypatch.setattr(D, 'CHUNK', 700)
    pieces = [p for p,_,_ in D.read_pieces(f)]
    assert len(pieces) > 10 and ''.join(pieces) == text and D.can_cut(tok)
    assert [i for p in pieces for i in tok.encode(p)] == whole
    prepare(f, tok, tmp_path/'out', val_fraction=0.)
    assert tokens(tmp_path/'out') == whole+[0]

def test_a_file_larger_than_memory_is_not_held(tmp_path, monkeypatch):
    monkeypatch.setattr(D, 'CHUNK', 1<<14)
    f = write(tmp_path/'a.txt', 'some words and then some more '*200_000)           # 6 MB
    tracemalloc.start()
    meta = prepare(f, BYTES, tmp_path/'out', val_fraction=0.)
    peak = tracemalloc.get_traced_memory()[1]; tracemalloc.stop()
    assert meta['splits']['train'] | dict(shards=0) == dict(tokens=6_000_001, documents=1, eos=True, shards=0)
    assert peak < 5e6

def test_jsonl(tmp_path):
    plain = write(tmp_path/'a.jsonl', rows(5))
    odd = write(tmp_path/'b.jsonl', codecs.BOM_UTF8 + rows(5).replace('\n', '\r\n\r\n').encode())
    assert docs(plain) == docs(odd) == [f'Document {i} of many.' for i in range(5)]
    sep = write(tmp_path/'c.jsonl', '{"text": "a\u2028b\x85c", "body": "d"}\n')                 # not line ends
    assert docs(sep) == ['a\u2028b\x85c'] and docs(sep, text_key='body') == ['d']

@pytest.mark.parametrize('line,why', [('{"text": 3}', "'text' must be a string, this is a int"), ('{"text": null}', 'NoneType'), ('{"body": ""}', "no key 'text'; it has 'body'"), ('{', 'not JSON'),
                                      ('"x"', 'JSON object'), ('{"text": "\\ud83d"}', 'lone surrogate'), ('['*20_000, 'not JSON|JSON object'), ('{"text": %s}' % ('9'*5000), 'not JSON|must be a string')])
def test_bad_rows_are_named(tmp_path, line, why):
    f = write(tmp_path/'a.jsonl', '{"text": "ok"}\n\n'+line+'\n')
    with pytest.raises(UserError, match=f'a.jsonl:3: .*({why})') as e: docs(f)
    assert '\n' not in str(e.value)

def test_parquet(tmp_path):
    pa, pq = pytest.importorskip('pyarrow'), pytest.importorskip('pyarrow.parquet')
    text = ['One.', '', 'Zwei 世界.']
    pq.write_table(pa.table(dict(text=text, n=[1, 2, 3])), tmp_path/'a.parquet')
    pq.write_table(pa.table(dict(text=pa.array(text).dictionary_encode())), tmp_path/'b.parquet')
    write(tmp_path/'c.parquet.gz', gzip.compress((tmp_path/'a.parquet').read_bytes()))
    for n in ('a.parquet', 'b.parquet', 'c.parquet.gz'): assert docs(tmp_path/n) == ['One.', 'Zwei 世界.']
    with pytest.raises(UserError, match="no column 'body'; it has 'text', 'n'"): docs(tmp_path/'a.parquet', text_key='body')
    with pytest.raises(UserError, match="row 0 of 'n' must be a string"): docs(tmp_path/'a.parquet', text_key='n')
    pq.write_table(pa.table(dict(text=['x', None])), tmp_path/'d.parquet')
    with pytest.raises(UserError, match='row 1'): docs(tmp_path/'d.parquet')
    for b in (b'', b'PAR1 not really', (tmp_path/'a.parquet').read_bytes()[:-9]):
        with pytest.raises(UserError, match='e.parquet: cannot read it as Parquet') as e: docs(write(tmp_path/'e.parquet', b))
        assert '\n' not in str(e.value)

def test_gzip(tmp_path):
    z = gzip.compress(rows(3).encode())
    assert len(docs(write(tmp_path/'a.jsonl.gz', z))) == 3
    assert docs(write(tmp_path/'a.txt.gz', gzip.compress(b'\xef\xbb\xbfHi'))) == ['Hi']
    for b in (z[:-5], b'plain text', z[:20]+b'\0\0\0\0'+z[24:]):
        with pytest.raises(UserError, match='b.jsonl.gz: damaged gzip'): docs(write(tmp_path/'b.jsonl.gz', b))

def test_a_dataset_on_disk_as_a_stream(tmp_path):
    pytest.importorskip('datasets')
    (tmp_path/'set').mkdir()
    write(tmp_path/'set'/'train.jsonl', rows(7)); write(tmp_path/'set'/'test.jsonl', rows(2))
    s = f'hf:{tmp_path}/set'
    assert len(docs(s)) == 7 and len(docs(s+':test')) == 2 and docs(s+':train[:3]') == docs(s)[:3]
    with pytest.raises(UserError, match="no string 'body'; it has 'text'"): docs(s, text_key='body')
    with pytest.raises(UserError, match='cannot load it') as e: docs(s+':nowhere')
    assert '\n' not in str(e.value)
    a = fingerprint(s); write(tmp_path/'set'/'test.jsonl', rows(3)); assert fingerprint(s) != a
    with pytest.raises(UserError, match='write hf:NAME'): docs('hf:')

def test_without_the_datasets_library(monkeypatch):
    monkeypatch.setitem(sys.modules, 'datasets', None)
    with pytest.raises(UserError, match=r'hf:x/y: .*pip install "xtrain\[hf\]"'): docs('hf:x/y')

# Dirt

@pytest.mark.parametrize('data,at,hint', [(b'good so far, then: \xff', 19, 'save it as UTF-8'), ('hello'.encode('utf-16'), 0, 'iconv -f UTF-16'), ('hello'.encode('utf-16-be'), None, ''),
                                          (codecs.BOM_UTF16_BE+'hello'.encode('utf-16-be'), 0, 'iconv'), ('aé'.encode('latin-1')+b'b', 1, ''), (b'x\xed\xa0\x80', 1, ''), (b'end \xf0\x9f\x98', 4, 'end of data'),
                                          (codecs.BOM_UTF8+b'ab\xc3(', 5, ''), (b'a'*70_000+b'\xe4\xbd', 70_000, 'end of data')])
@pytest.mark.parametrize('chunk', [5, 1<<20])
def test_bytes_that_are_not_utf8(tmp_path, monkeypatch, data, at, hint, chunk):
    monkeypatch.setattr(D, 'CHUNK', chunk)
    f = write(tmp_path/'a.txt', data)
    if at is None: assert docs(f) == ['\0h\0e\0l\0l\0o']; return                 # NULs and ASCII are valid UTF-8
    with pytest.raises(UserError, match=f'a.txt: not UTF-8 at byte {at} .*{hint}') as e: docs(f)
    assert '\n' not in str(e.value)

def test_bad_bytes_in_a_row_are_counted_from_the_start_of_the_file(tmp_path):
    head = codecs.BOM_UTF8+rows(2).encode()
    with pytest.raises(UserError, match=f'a.jsonl:3: not UTF-8 at byte {len(head)+12}'): docs(write(tmp_path/'a.jsonl', head+b'{"text": "ab\xff"}'))
    bad = write(tmp_path/'b.jsonl', codecs.BOM_UTF8+b'{"text": "\xff"}')
    with pytest.raises(UserError, match='b.jsonl:1: not UTF-8 at byte 13'): docs(bad)
    with pytest.raises(UserError, match='UTF-16'): docs(write(tmp_path/'c.jsonl', rows(1).encode('utf-16')))

def test_marks_line_ends_and_nuls_are_kept(tmp_path):
    t = 'a\r\nb\rc\n\0d\ufeffe'
    assert docs(write(tmp_path/'a.txt', codecs.BOM_UTF8+t.encode())) == [t]
    prepare(tmp_path/'a.txt', BYTES, tmp_path/'o', val_fraction=0.)
    assert BYTES.decode(tokens(tmp_path/'o')[:-1]) == t

def test_control_text_ends_no_document(tmp_path):
    texts = [f'First talks about {EOS} as text.', 'Second, plain.', f'Third: {EOS}{EOS} twice, <|im_end|> too.']
    f = write(tmp_path/'a.jsonl', ''.join(json.dumps(dict(text=t))+'\n' for t in texts))
    prepare(f, BYTES, tmp_path/'o', val_fraction=0.)
    ids = tokens(tmp_path/'o')
    assert ids.count(0) == 3 and ids[-1] == 0
    assert BYTES.decode(ids, special=False) == ''.join(texts)

def test_no_eos_no_ends(tmp_path):
    tok = Tokenizer.train([], 256, eos=None)
    meta = prepare(write(tmp_path/'a.jsonl', rows(4)), tok, tmp_path/'o', val_fraction=0.)
    assert tok.decode(tokens(tmp_path/'o')) == ''.join(docs(tmp_path/'a.jsonl')) and meta['eos_id'] is None and meta['splits']['train']['eos'] is False

# Borders

@pytest.mark.parametrize('n,fits', [(62, False), (63, False), (64, True), (65, True), (128, True)])
def test_borders_with_an_eos(tmp_path, n, fits):
    "n bytes and an EOS are n+1 tokens; a window of 64 needs 65"
    prepare(write(tmp_path/'a.txt', 'x'*n), BYTES, tmp_path/'o', seq_len=64)
    t = TokenData(tmp_path/'o')
    assert len(t) == n+1 and len(TokenData(tmp_path/'o', 'val')) == 0
    if fits: assert Batches(t, 64, 2).windows == n//64
    else:
        with pytest.raises(UserError, match=rf'{n+1} tokens \({n} of text and 1 end-of-document\).*seq_len 64 needs 65.*--seq-len {n} or less'): Batches(t, 64, 2)

def test_borders_without(tmp_path):
    assert Batches(TokenData(np.arange(65)), 64, 1).windows == 1
    with pytest.raises(UserError, match='has 64 tokens, but .* needs 65'): Batches(TokenData(np.arange(64)), 64, 1)

@pytest.mark.parametrize('name,text', [('a.txt', ''), ('a.jsonl', ''), ('a.jsonl', '\n\n'), ('a.jsonl', '{"text": ""}\n'), ('a.txt', '\ufeff')])
def test_nothing_at_all(tmp_path, name, text):
    prepare(write(tmp_path/name, text), BYTES, tmp_path/'o', seq_len=8)
    with pytest.raises(UserError, match='has 0 tokens, but one window of seq_len 8 needs 9'): Batches(TokenData(tmp_path/'o'), 8, 1)

def test_one_document_and_only_newlines(tmp_path):
    meta = prepare(write(tmp_path/'a.txt', '\n'*64), BYTES, tmp_path/'o', seq_len=8)
    assert meta['held_out'] == 'tail' and meta['splits']['train']['tokens'] == 56 and meta['splits']['val']['tokens'] == 9
    both = tokens(tmp_path/'o')+tokens(tmp_path/'o', 'val')
    assert both == BYTES.encode('\n'*64)+[0]

def test_a_share_that_was_asked_for_is_not_dropped_silently(tmp_path):
    f = write(tmp_path/'a.txt', 'x'*80)
    with pytest.raises(UserError, match='81 tokens cannot be parted.*each need 65'): prepare(f, BYTES, tmp_path/'o', seq_len=64, val_fraction=.1)
    assert not (tmp_path/'o').exists() and [p.name for p in tmp_path.iterdir()] == ['a.txt']     # nothing half-made
    for bad in (-.1, 1., 2.):
        with pytest.raises(UserError, match='val_fraction'): prepare(f, BYTES, tmp_path/'o', val_fraction=bad)

def test_held_out_text_of_its_own(tmp_path):
    a, b = write(tmp_path/'a.jsonl', rows(9)), write(tmp_path/'b.txt', 'Other text.')
    meta = prepare(a, BYTES, tmp_path/'o', val_source=b)
    assert meta['splits']['train']['documents'] == 9 and BYTES.decode(tokens(tmp_path/'o', 'val')) == 'Other text.'+EOS
    for empty in ('', '\ufeff'):
        with pytest.raises(UserError, match='--val-data .*b.txt: 0 tokens'): prepare(a, BYTES, tmp_path/'p', val_source=write(b, empty))

# Held out by hash

def test_the_split_is_by_text(tmp_path):
    a = write(tmp_path/'a.jsonl', rows(600)); b = write(tmp_path/'b.jsonl', ''.join(reversed((rows(600)+rows(600)).splitlines(True))))
    ma, mb = prepare(a, BYTES, tmp_path/'oa'), prepare(b, BYTES, tmp_path/'ob')
    split = lambda d, s: BYTES.decode(tokens(d, s)).split(EOS)[:-1]
    va, vb = split(tmp_path/'oa', 'val'), split(tmp_path/'ob', 'val')
    assert set(va) == set(vb) and len(vb) == 2*len(va) and not set(va) & set(split(tmp_path/'ob', 'train'))
    assert 10 < len(va) < 60 and ma['splits']['val']['documents'] == len(va) and ma['held_out'] == 'by hash'

def test_all_on_one_side_by_hash(tmp_path):
    "A single document whose hash says 'held out' is trained on all the same"
    import hashlib
    text = next(t for i in range(1000) if D.is_held_out(hashlib.sha256((t := f'{i} '*99).encode()).digest(), .05))
    meta = prepare(write(tmp_path/'a.txt', text), BYTES, tmp_path/'o', seq_len=16, shard_tokens=50)
    assert meta['held_out'] == 'tail' and meta['splits']['train']['tokens'] > 150 and all(s['file'].startswith('train') for s in meta['splits']['train']['shards'])
    assert BYTES.decode(tokens(tmp_path/'o')+tokens(tmp_path/'o', 'val')) == text+EOS

# Tokens on disk

def test_shards_are_cut_and_joined(tmp_path):
    f = write(tmp_path/'a.jsonl', rows(50))
    meta = prepare(f, BYTES, tmp_path/'o', val_fraction=0., shard_tokens=100); prepare(f, BYTES, tmp_path/'p', val_fraction=0.)
    sh = meta['splits']['train']['shards']
    assert len(sh) > 5 and {s['tokens'] for s in sh[:-1]} == {100} and meta['dtype'] == '<u2'
    assert tokens(tmp_path/'o') == tokens(tmp_path/'p')
    o, p = TokenData(tmp_path/'o'), TokenData(tmp_path/'p')
    s = np.arange(0, len(o)-330, 7)
    assert (o.gather(s, 330) == p.gather(s, 330)).all() and o.gather(s, 3).dtype == np.int64

def test_large_vocabularies_need_32_bits(tmp_path):
    class Wide:
        vocab_size, eos_id, sha256, json, raw, parts = 70_000, 69_999, "x", BYTES.json, BYTES.raw, BYTES.parts; byte_level = True
        def encode_batch(self, ts): return [[65_536+ord(c)%100 for c in t] for t in ts]
    meta = prepare(write(tmp_path/'a.txt', 'abc'), Wide(), tmp_path/'o', val_fraction=0.)
    assert meta['dtype'] == '<u4' and tokens(tmp_path/'o') == [65_633, 65_634, 65_635, 69_999]

def test_reuse_and_its_reasons(tmp_path):
    f, said = write(tmp_path/'a.jsonl', rows(80)), []
    make = lambda **kw: (said.clear(), prepare(kw.pop('source', f), kw.pop('tok', BYTES), tmp_path/'o', log=said.append, **kw))[1]
    make(); assert 'tokens are made' in said[0]
    at = (tmp_path/'o'/'train-00000.bin').stat().st_mtime_ns
    os.utime(f, (0, 0)); make(); assert 'reused' in said[0] and (tmp_path/'o'/'train-00000.bin').stat().st_mtime_ns == at     # times do not count
    make(seq_len=32); assert 'reused' in said[0]                                 # a split by hash does not depend on it
    write(f, rows(80).replace('80', '81').replace('Document 7 ', 'Document X ')); make(); assert 'because of source' in said[0]
    make(tok=Tokenizer.train(docs(f), 270)); assert 'because of tokenizer, ' in said[0]+', '
    make(); make(val_fraction=.2); assert 'because of val_fraction' in said[0]
    make(val_fraction=.2, val_source='stories:3'); assert 'val_source' in said[0]
    make(); os.truncate(tmp_path/'o'/'train-00000.bin', 10); make(); assert 'damaged' in said[0] and len(tokens(tmp_path/'o')) > 100
    (tmp_path/'o'/'val-00000.bin').unlink(); make(); assert 'tokens are made' in said[0] and len(tokens(tmp_path/'o', 'val')) > 0
    for junk in ('', '[]', '{}', '{"key": 3}'): write(tmp_path/'o'/'meta.json', junk); make(); assert 'tokens are made' in said[0]
    write(tmp_path/'b.jsonl', 'x'); make(); assert 'reused' in said[0]           # another file beside it does not count
    with pytest.raises(UserError): make(source=tmp_path/'b.jsonl')
    make(); assert 'reused' in said[0]                                           # what failed has spoilt nothing

def test_a_renamed_or_reordered_file_is_a_change(tmp_path):
    write(tmp_path/'a.txt', 'one'); write(tmp_path/'b.txt', 'two')
    a = fingerprint(tmp_path)
    (tmp_path/'b.txt').rename(tmp_path/'0.txt'); assert fingerprint(tmp_path) != a
    assert fingerprint(tmp_path, separator='x') != fingerprint(tmp_path) and fingerprint('stories:5') != fingerprint('stories:6')

def test_stories_know_their_floor(tmp_path):
    tok = Tokenizer.train(read_documents('stories:200'), 500)
    meta = prepare('stories:400', tok, tmp_path/'data')
    ids = tokens(tmp_path/'data', 'val')
    texts = tok.decode(ids).split(EOS)[:-1]
    nats = -sum(Stories(0).logprob(t) for t in texts)
    assert meta['floor']['nats_per_token'] == pytest.approx(nats/len(ids), rel=1e-9) and meta['floor']['documents'] == len(texts)
    assert held_out(tmp_path).tolist() == ids and held_out(tmp_path/'no') is None
    assert 'floor' not in prepare(write(tmp_path/'a.jsonl', rows(99)), tok, tmp_path/'o')
    own = prepare(tmp_path/'a.jsonl', tok, tmp_path/'p', val_source='stories:20:9')
    assert own['floor']['documents'] == 20
    assert 'floor' not in prepare('stories:50', tok, tmp_path/'q', val_source=tmp_path/'a.jsonl')

def test_no_tokens_here(tmp_path):
    with pytest.raises(UserError, match='no prepared tokens'): TokenData(tmp_path)
    for meta in ('{}', '[]', '{"splits": {"train": {"shards": [{"file": "gone.bin"}]}}, "dtype": "<u2"}', '{"splits": {"train": {"shards": [{"file": "empty.bin"}]}}, "dtype": "<u2"}'):
        write(tmp_path/'meta.json', meta); write(tmp_path/'empty.bin', b'')
        with pytest.raises(UserError, match='no prepared tokens'): TokenData(tmp_path)

def test_a_file_that_grows_while_it_is_read(tmp_path, monkeypatch):
    "A download, a log: the tokens would not be those of the hash beside them"
    f, real = write(tmp_path/'a.txt', 'A book. '*50), D.encode_into
    def grown(*a, **kw):
        real(*a, **kw)
        with open(f, 'a') as g: g.write('More.')
    monkeypatch.setattr(D, 'encode_into', grown)
    for kw in (dict(source=f), dict(source='stories:9', val_source=f)):
        with pytest.raises(UserError, match='a.txt changed while it was read'): prepare(**kw, tok=BYTES, out_dir=tmp_path/'o')
    assert os.listdir(tmp_path) == ['a.txt']

def test_a_file_is_hashed_once(tmp_path, monkeypatch):
    "A run asked three times: whether it is what it began with, what the tokens are made of, whether it changed meanwhile"
    f, real, n = write(tmp_path/'a.txt', 'A book. '*50), D.hashlib.file_digest, []
    monkeypatch.setattr(D.hashlib, 'file_digest', lambda *a: n.append(1) or real(*a))
    was = fingerprint(f); prepare(f, BYTES, tmp_path/'o')
    assert len(n) == 1
    text = (tmp_path/'a.txt').read_text()
    (tmp_path/'a.txt').write_text(text.replace('book', 'cook')); assert fingerprint(f) != was     # as long as before
    write(tmp_path/'b.txt', text); os.replace(tmp_path/'b.txt', tmp_path/'a.txt'); assert fingerprint(f) == was
    assert len(n) == 3

def test_files_of_others_are_never_replaced(tmp_path):
    "`--data data/books.txt --out .`: tokens would go into the very folder that the books lie in"
    d = tmp_path/'data'; d.mkdir(); f = write(d/'books.txt', 'A book. '*50)
    with pytest.raises(UserError, match="holds 'books.txt', which is not part of the tokens"): prepare(f, BYTES, d)
    assert os.listdir(d) == ['books.txt'] and os.listdir(tmp_path) == ['data']
    prepare(f, BYTES, tmp_path/'o'); write(tmp_path/'o'/'.DS_Store', 'x')
    prepare(f, BYTES, tmp_path/'o', seq_len=8)                                   # what we wrote is
    for name in ('.git', 'val-00000.bin'):                                       # a folder is nothing of ours, by whatever name
        (x := tmp_path/'o'/name).unlink(missing_ok=True); x.mkdir()
        with pytest.raises(UserError, match=f"holds '{re.escape(name)}'"): prepare(f, BYTES, tmp_path/'o')
        x.rmdir()

# Batches

@pytest.mark.parametrize('n', [1, 2, 3, 5, 16, 17, 255, 1000, 4096, 70_001])
def test_every_order_is_a_permutation(n):
    orders = [permute(np.arange(n), n, s, e) for s in (0, 1) for e in (0, 1)]
    for o in orders: assert (np.sort(o) == np.arange(n)).all()
    if n > 16: assert len({o.tobytes() for o in orders}) == 4
    assert (permute(np.array([n-1, 0]), n, 1, 1) == orders[3][[n-1, 0]]).all()

def test_orders_look_random():
    n, hits = 64, np.zeros((64, 64))
    for e in range(2000): hits[np.arange(n), permute(np.arange(n), n, 3, e)] += 1
    chi2 = ((hits-2000/64)**2/(2000/64)).sum()                                  # 63² degrees of freedom
    assert abs(chi2-63*63) < 6*(2*63*63)**.5

def test_orders_stay_what_they_were():
    assert permute(np.arange(8), 8, 0, 0).tolist() == GOLDEN[0] and permute(np.array([0, 10**9]), 3*10**9, 7, 2).tolist() == GOLDEN[1]
GOLDEN = [[0, 5, 1, 2, 6, 7, 4, 3], [1858501751, 1636911984]]

def test_each_window_once_an_epoch_across_batches():
    N, T, B = 1003, 50, 7
    b = Batches(TokenData(np.arange(N)), T, B, seed=5)
    assert (b.windows, b.spare) == (20, 2)
    got = np.concatenate([b.batch(s)[0][:, 0].numpy() for s in range(20)])
    for e in range(7):
        s = np.sort(got[e*20:e*20+20])
        assert s[0] <= 2 and (s-s[0] == np.arange(20)*50).all()
    x, y = b.batch(11)
    assert x.dtype == y.dtype == torch.int64 and (y == x+1).all() and x.is_contiguous() and y.is_contiguous()
    assert all(torch.equal(u, v) for u,v in zip(b.batch(4), Batches(TokenData(np.arange(N)), T, B, seed=5).batch(4)))
    assert not torch.equal(b.batch(4)[0], Batches(TokenData(np.arange(N)), T, B, seed=6).batch(4)[0])
    offsets = {int(b.starts(np.arange(e*20, e*20+20)).min()) for e in range(40)}
    assert offsets == {0, 1, 2}                                                  # left-over tokens get their turn

@pytest.mark.parametrize('world', [1, 2, 3, 6])
def test_ranks_together_are_one(world):
    d = TokenData(np.arange(777))
    for step in (0, 5): assert torch.equal(torch.cat([Batches(d, 10, 12, 1, r, world).batch(step)[0] for r in range(world)]), Batches(d, 10, 12, 1).batch(step)[0])
    with pytest.raises(UserError, match='not a multiple of the 5 ranks'): Batches(d, 10, 12, 0, 0, 5)
    with pytest.raises(ValueError, match='rank'): Batches(d, 10, 12, 0, 2, 2)

def test_a_batch_larger_than_the_data():
    x, _ = Batches(TokenData(np.arange(65)), 64, 5).batch(3)
    assert x.shape == (5, 64) and (x == torch.arange(64)).all()

def test_huge_data_costs_nothing_per_step():
    class Huge(TokenData):
        def __init__(self): self.split, self.info = 'train', {}
        def __len__(self): return 10**12
        def gather(self, s, n): return s[:, None]+np.arange(n)
    b = Batches(Huge(), 1024, 8)
    t = time.process_time()
    for s in range(200): x, y = b.batch(s*10**6)
    assert time.process_time()-t < 4 and (y == x+1).all() and x.max() > 10**11

# Scoring

@pytest.mark.parametrize('N', [2, 3, 63, 64, 65, 66, 129, 700])
@pytest.mark.parametrize('context', [0, 1, 32, 63])
def test_every_token_is_scored_once_with_its_context(N, context):
    seen = []
    for x,y in eval_batches(TokenData(np.arange(N)), 64, 3, context):
        assert x.shape == y.shape and len(x) <= 3
        for a,b in zip(x.tolist(), y.tolist()):
            assert all(t in (-100, i+1) for i,t in zip(a, b))
            got = [t for t in b if t >= 0]
            if seen and got: assert got[0]-1-a[0] >= context
            seen += got
    assert seen == list(range(1, N))

def test_scoring_stops_and_refuses():
    d = TokenData(np.arange(1000), 'val')
    n = sum(int((y >= 0).sum()) for _,y in eval_batches(d, 64, 2, 0, max_tokens=200))
    assert n == 256
    with pytest.raises(UserError, match='held-out text has 1 tokens'): next(eval_batches(TokenData(np.arange(1), 'val'), 64, 2))
    for c in (-1, 64):
        with pytest.raises(ValueError, match='context'): next(eval_batches(d, 64, 2, c))
