"""A stand-in for the specification's server: Qwen3 in numpy, with a KV cache; nothing of xtrain, of torch or of transformers in it.

    xserv.py xserv-cli DIR PROMPT --max-tokens N    prints the prompt and its greedy continuation
    xserv.py dump-logits DIR PROMPT                 prints the likeliest next tokens

Like the original it reads BF16 only and computes in it: every result is rounded. With --f32 none is."""
import json, struct, sys
from pathlib import Path
import numpy as np
from tokenizers import Tokenizer

def bf16(x):
    "Round to the nearest number with eight significant bits, to the even one of two"
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return (u + 0x7fff + (u >> 16 & 1) & 0xffff0000).view(np.float32)

def read_tensors(file):
    "A safetensors file is the length of its header, the header, and the numbers"
    b = file.read_bytes()
    start = 8 + struct.unpack('<Q', b[:8])[0]
    head = json.loads(b[8:start])
    head.pop('__metadata__', None)
    for name,t in head.items():
        if t['dtype'] != 'BF16': sys.exit(f'{name} is {t["dtype"]}; only BF16 is served')
        i, j = t['data_offsets']
        yield name, (np.frombuffer(b[start+i:start+j], '<u2').astype(np.uint32) << 16).view(np.float32).reshape(t['shape'])

class Qwen3:
    def __init__(self, dir, rounded):
        self.rd = bf16 if rounded else np.float32
        self.c, self.w, self.n = json.loads((dir/'config.json').read_text()), dict(read_tensors(dir/'model.safetensors')), 0
        c, D = self.c, self.c['head_dim']
        angle = np.arange(c['max_position_embeddings'])[:,None] * c['rope_theta']**(-np.arange(0, D, 2)/D)
        self.cos, self.sin = self.rd(np.cos(angle)), self.rd(np.sin(angle))
        self.k, self.v = ([np.zeros((c['num_key_value_heads'], 0, D), np.float32) for _ in range(c['num_hidden_layers'])] for _ in 'kv')

    def linear(self, x, name): return self.rd(x @ self.w[name+'.weight'].T)
    def norm(self, x, name):
        return self.rd(self.rd(x/np.sqrt((x*x).mean(-1, keepdims=True) + self.c['rms_norm_eps'])) * self.w[name+'.weight'])

    def heads(self, x, name, n, norm=''):
        x = x.reshape(len(x), n, -1)
        return (self.norm(x, norm) if norm else x).transpose(1, 0, 2)

    def rope(self, x):
        a, b = np.split(x, 2, -1)
        cos, sin = (t[self.n:self.n+x.shape[1]] for t in (self.cos, self.sin))
        return self.rd(np.concatenate([self.rd(a*cos) - self.rd(b*sin), self.rd(b*cos) + self.rd(a*sin)], -1))

    def attend(self, x, i):
        p, H, K = f'model.layers.{i}.self_attn.', self.c['num_attention_heads'], self.c['num_key_value_heads']
        q = self.rope(self.heads(self.linear(x, p+'q_proj'), p, H, p+'q_norm'))
        k = self.rope(self.heads(self.linear(x, p+'k_proj'), p, K, p+'k_norm'))
        self.k[i] = np.concatenate([self.k[i], k], 1)
        self.v[i] = np.concatenate([self.v[i], self.heads(self.linear(x, p+'v_proj'), p, K)], 1)
        k, v = (np.repeat(t[i], H//K, 0) for t in (self.k, self.v))        # query head h reads KV head h // group
        s = self.rd(self.rd(q @ k.transpose(0, 2, 1)) * self.c['head_dim']**-.5)
        s = np.where(np.arange(k.shape[1]) <= self.n + np.arange(len(x))[:,None], s, -np.inf)
        e = np.exp(s - s.max(-1, keepdims=True))
        o = self.rd(self.rd(e/e.sum(-1, keepdims=True)) @ v)
        return self.linear(o.transpose(1, 0, 2).reshape(len(x), -1), p+'o_proj')

    def __call__(self, ids):
        "Logits after the last of `ids`, which continue what was given before"
        x = self.w['model.embed_tokens.weight'][ids]
        for i in range(self.c['num_hidden_layers']):
            p = f'model.layers.{i}.'
            x = self.rd(x + self.attend(self.norm(x, p+'input_layernorm'), i))
            y = self.norm(x, p+'post_attention_layernorm')
            g = self.linear(y, p+'mlp.gate_proj')
            x = self.rd(x + self.linear(self.rd(self.rd(g/(1+np.exp(-g))) * self.linear(y, p+'mlp.up_proj')), p+'mlp.down_proj'))
        self.n += len(ids)
        return self.linear(self.norm(x[-1:], 'model.norm'), 'model.embed_tokens' if self.c['tie_word_embeddings'] else 'lm_head')[0]

def main(prog, dir, prompt, *options):
    dir = Path(dir)
    model, tok = Qwen3(dir, '--f32' not in options), Tokenizer.from_file(str(dir/'tokenizer.json'))
    ids = tok.encode(prompt).ids
    z = model(ids)
    if prog == 'dump-logits':
        print(f'prompt ids {ids}\nrank    logit     id  token')
        for r,i in enumerate(np.argsort(-z, kind='stable')[:11]): print(f'{r:4} {z[i]:8.4f} {i:6}  {json.dumps(tok.decode([i]), ensure_ascii=False)}')
    if prog == 'xserv-cli':
        stop, new = model.c['eos_token_id'], []
        for _ in range(int(options[options.index('--max-tokens')+1])):
            new.append(int(z.argmax()))
            if new[-1] in (stop if isinstance(stop, list) else [stop]): break
            z = model(new[-1:])
        print(tok.decode(ids + new))

main(*sys.argv[1:])
