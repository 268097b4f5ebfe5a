"""Training speed on a CPU: `xtrain train` beside a plain PyTorch model of the same shape, taken in turns in one run.

    python tools/bench_cpu.py [t9|gqa ...] [--rounds 3] [--peer FILE]

The plain model is what a good PyTorch programmer would write: `nn.RMSNorm`, fused QKV and gate-up projections,
`scaled_dot_product_attention`, one matrix of logits, `F.cross_entropy`, fused AdamW, gradient clipping; eager, float32.
`--peer FILE` takes the class `M` of another script instead (called with a config of transformers' field names and the
sequence length; its forward takes inputs and targets and returns the loss). Ours is the command itself, in a process of
its own, as it logs its tokens per second. Prints both and the ratio of the medians.
"""
import json, os, statistics, subprocess, sys, tempfile, time, types
from pathlib import Path

import click
import torch, torch.nn as nn, torch.nn.functional as F

SHAPES = { # name: (model, batch, sequence length)
    't9': (dict(vocab_size=50257, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=2, head_dim=16), 8, 256),
    'gqa': (dict(vocab_size=4096, hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, head_dim=32), 8, 256),
}

def rope(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x*cos + torch.cat((-b, a), -1)*sin

class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        d, self.hd, self.H, self.K = c.hidden_size, c.head_dim, c.num_attention_heads, c.num_key_value_heads
        self.n1, self.n2, self.qn, self.kn = nn.RMSNorm(d), nn.RMSNorm(d), nn.RMSNorm(self.hd), nn.RMSNorm(self.hd)
        self.qkv, self.o = nn.Linear(d, (self.H+2*self.K)*self.hd, bias=False), nn.Linear(self.H*self.hd, d, bias=False)
        self.gate_up, self.down = nn.Linear(d, 2*c.intermediate_size, bias=False), nn.Linear(c.intermediate_size, d, bias=False)

    def forward(self, x, cos, sin):
        B, T, _ = x.shape
        q, k, v = self.qkv(self.n1(x)).view(B, T, -1, self.hd).split([self.H, self.K, self.K], 2)
        q, k = rope(self.qn(q), cos, sin).transpose(1, 2), rope(self.kn(k), cos, sin).transpose(1, 2)
        a = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True, enable_gqa=True)
        x = x + self.o(a.transpose(1, 2).reshape(B, T, -1))
        gate, up = self.gate_up(self.n2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate)*up)

class Plain(nn.Module):
    def __init__(self, c, T):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(c.vocab_size, c.hidden_size), nn.ModuleList(Block(c) for _ in range(c.num_hidden_layers))
        self.norm, self.head = nn.RMSNorm(c.hidden_size), nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        a = torch.outer(torch.arange(T).float(), 1e4**(-torch.arange(0, c.head_dim, 2).float()/c.head_dim))
        a = torch.cat((a, a), -1)[:, None]
        self.register_buffer('cos', a.cos(), False)
        self.register_buffer('sin', a.sin(), False)
        nn.init.normal_(self.embed.weight, std=.02)

    def forward(self, x, y):
        h = self.embed(x)
        for b in self.blocks: h = b(h, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())

def load_peer(path):
    "Class `M` of a script, without running the benchmark it holds"
    src = Path(path).read_text()
    mod = types.ModuleType('peer')
    body = src.split('\nrows = []')[0].replace('.bfloat16()', '.float()').replace('.to(torch.bfloat16)', '')
    sys.path.insert(0, str(Path(path).parent))
    argv, sys.argv = sys.argv, ['peer']
    try: exec(compile(body, path, 'exec'), mod.__dict__)
    finally: sys.argv = argv
    return mod.M

def plain_tokens_per_second(model, shape, B, T, steps):
    "Median over `steps` training steps after 3 that are not counted"
    torch.manual_seed(0)
    m = model(types.SimpleNamespace(**shape), T)
    opt = torch.optim.AdamW(m.parameters(), lr=1e-4, fused=True)
    times = []
    for _ in range(steps+3):
        x, y = torch.randint(shape['vocab_size'], (2, B, T))
        t = time.perf_counter()
        m(x, y).backward()
        torch.nn.utils.clip_grad_norm_(m.parameters(), 1.)
        opt.step()
        opt.zero_grad(set_to_none=True)
        times.append(time.perf_counter()-t)
    return B*T/statistics.median(times[3:])

def padded_tokenizer(path, V):
    "A tokenizer of the stories with as many ids as the shape has rows; the ids that are added never occur, and cost the same"
    from xtrain.stories import Stories
    from xtrain.tokenizer import Tokenizer
    import tokenizers
    Tokenizer.train((Stories(0).story(i)[0] for i in range(500)), 512).save(path)
    t = tokenizers.Tokenizer.from_file(str(path))
    t.add_tokens([f'<unused {i}>' for i in range(V-t.get_vocab_size())])
    t.save(str(path))
    return str(path)

def xtrain_tokens_per_second(shape, B, T, steps):
    "What `xtrain train` logs at the same shape: median over the logged steps, the first 3 not counted"
    with tempfile.TemporaryDirectory() as d:
        flags = dict(dim=shape['hidden_size'], n_layers=shape['num_hidden_layers'], n_heads=shape['num_attention_heads'], kv_heads=shape['num_key_value_heads'],
                     head_dim=shape['head_dim'], ffn_dim=shape['intermediate_size'], vocab_size=shape['vocab_size'], seq_len=T, batch_size=B, steps=steps+3,
                     device='cpu', dtype='float32', data='stories:2000', tokenizer=padded_tokenizer(Path(d)/'tokenizer.json', shape['vocab_size']), eval_every=0, save_every=0, log_every=1, out=f'{d}/run')
        cmd = [sys.executable, '-c', 'from xtrain.cli import main; main()', 'train'] + [a for k,v in flags.items() for a in (f"--{k.replace('_','-')}", str(v))]
        r = subprocess.run(cmd, capture_output=True, text=True)
        if r.returncode: sys.exit(f"{' '.join(cmd)}\n{r.stderr}")
        V = json.loads(Path(f'{d}/run/config.json').read_text())['model']['vocab_size']
        if V != shape['vocab_size']: sys.exit(f"the run has {V} rows, not {shape['vocab_size']}")
        rows = [json.loads(l) for l in Path(f'{d}/run/metrics.jsonl').read_text().splitlines()]
    return statistics.median([r['tokens_per_second'] for r in rows if 'tokens_per_second' in r][3:])

@click.command(help=__doc__.split('\n')[0])
@click.argument('names', nargs=-1, type=click.Choice(list(SHAPES)))
@click.option('--rounds', default=3, help='Times each side is measured, in turns.')
@click.option('--steps', default=20, help='Counted steps a round.')
@click.option('--peer', type=click.Path(exists=True), help='A script whose class M is the plain model.')
@click.option('--json', 'as_json', is_flag=True, help='Print JSON.')
def main(names, rounds, steps, peer, as_json):
    model, out = load_peer(peer) if peer else Plain, []
    for name in names or SHAPES:
        shape, B, T = SHAPES[name]
        ours, plain = [], []
        for _ in range(rounds):
            plain.append(plain_tokens_per_second(model, shape, B, T, steps))
            ours.append(xtrain_tokens_per_second(shape, B, T, steps))
        out.append(dict(shape=name, batch=B, seq_len=T, threads=torch.get_num_threads(), torch=torch.__version__, xtrain=statistics.median(ours), plain=statistics.median(plain),
                        ratio=statistics.median(ours)/statistics.median(plain), xtrain_all=ours, plain_all=plain))
        if not as_json: print('{shape}: xtrain {xtrain:,.0f} tokens/s, plain {plain:,.0f}, ratio {ratio:.2f} ({batch}x{seq_len}, {threads} threads, torch {torch})'.format(**out[-1]), flush=True)
    if as_json: print(json.dumps(out, indent=1))

if __name__ == '__main__': main()
