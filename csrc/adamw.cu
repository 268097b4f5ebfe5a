// AdamW over any number of tensors: a master, its gradient and both moments are read once and written once, a copy in another
// dtype goes out in the same pass. Bytes per parameter in float32: 16 read, 12 written; 2 more for a bf16 copy.
// The norm of all gradients is summed in float64 in a fixed order; the clip factor, the step counts and everything that
// depends on them are computed on the device, so the host never waits and a CUDA graph may replay the step.
// Bits are those of torch's single-tensor AdamW on a GPU: `update` is its eight routines in a row, each rounded as there.
#include "common.cuh"
#include <algorithm>
#include <cmath>
#include <type_traits>

// One rounding per operation: a compiler may otherwise turn a * b + c into one fused operation, with other bits.
#ifdef __CUDA_ARCH__
__device__ __forceinline__ float mul(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ double mul(double a, double b) { return __dmul_rn(a, b); }
__device__ __forceinline__ double add(double a, double b) { return __dadd_rn(a, b); }
#else
template <class T> inline T rounded(T x) { volatile T y = x; return y; }
template <class T> inline T mul(T a, T b) { return rounded(a * b); }
template <class T> inline T add(T a, T b) { return rounded(a + b); }
using std::fma; using std::sqrt;
#endif

// What a step multiplies by: the same for all elements of a tensor. `divides` says how torch divides a tensor by a number:
// 0 does, 1 multiplies by the float32 reciprocal, 2 by the reciprocal in float64 rounded once.
struct alignas(16) Factors { float decay, w1, b2, w2, eps, minus_step_size, root, clip; int divides, ok, pad[2]; };

HD void update(float& p, float& m, float& v, float g, const Factors& f) {
    g = mul(g, f.clip);
    p = mul(p, f.decay);
    const float d = add(g, -m);
    m = f.w1 < .5f ? fma(f.w1, d, m) : fma(-d, add(1.f, -f.w1), g);                 // lerp: from the nearer end
    v = fma(f.w2, mul(g, g), mul(v, f.b2));
    const float s = sqrt(v), u = add(f.divides ? mul(s, f.root) : s / f.root, f.eps);
    p = fma(f.minus_step_size, m / u, p);
}

// b^n with twice the digits of a double, then rounded: equal to the host's pow but for one case in billions
HD double power(double b, int64_t n) {
    double h = 1, l = 0, bh = b, bl = 0;
    for (; n; n >>= 1) {
        const double p = h * bh, e = fma(h, bh, -p) + (h * bl + l * bh), q = bh * bh, k = fma(bh, bh, -q) + 2 * bh * bl;
        if (n & 1) { h = p + e; l = e - (h - p); }
        bh = q + k; bl = k - (bh - q);
    }
    return h + l;
}

// lr, beta1, beta2, eps, weight decay of a group
struct Hyper { double lr, b1, b2, eps, decay; };

HD Factors factors(const Hyper& h, double step, double norm, double max_norm, int divides) {
    const double bc1 = 1 - power(h.b1, (int64_t)step), root = sqrt(1 - power(h.b2, (int64_t)step));
    Factors f;
    f.decay = (float)add(1., -mul(h.lr, h.decay));
    f.w1 = (float)add(1., -h.b1); f.b2 = (float)h.b2; f.w2 = (float)add(1., -h.b2); f.eps = (float)h.eps;
    f.minus_step_size = (float)-(h.lr / bc1);
    f.root = divides == 0 ? (float)root : divides == 1 ? 1.f / (float)root : (float)(1 / root);
    f.clip = norm > max_norm ? (float)(max_norm / norm) : 1.f;
    f.divides = divides;
    return f;
}

#ifdef __CUDACC__
constexpr int64_t CHUNK = 1 << 14;                                  // elements that a block takes care of
constexpr int FEW = 48, MANY = 480;                                 // tensors of one launch; the table travels as the kernel's argument, so a graph keeps it

template <int N> struct Table { int n, base; int first[N + 1]; int64_t size[N]; };   // first: block where a tensor begins
template <int N> struct Grads { Table<N> t; const void* g[N]; };
template <int N> struct Step { Table<N> t; float *p[N], *m[N], *v[N]; const void* g[N]; void* c[N]; };
template <int N> struct Counts { int n, base; float* step[N]; unsigned char group[N]; };
constexpr int GROUPS = 32;
struct Groups { Hyper h[GROUPS]; };

// the tensor of a block: the last one that begins at or before it
template <int N> __device__ __forceinline__ int tensor_of(const Table<N>& t, int block) {
    int lo = 0, hi = t.n;
    while (hi - lo > 1) { const int mid = (lo + hi) >> 1; if (t.first[mid] <= block) lo = mid; else hi = mid; }
    return lo;
}
template <class T> __device__ __forceinline__ bool aligned(const T* p, int n) { return !(reinterpret_cast<uintptr_t>(p) & (sizeof(T) * n - 1)); }

// Sum of the squares of each chunk. A thread takes the same elements whether the tensor is aligned or not, so the bits are the same.
template <class G, int N> __global__ void __launch_bounds__(512) square_sums(const __grid_constant__ Grads<N> a, double* __restrict__ part) {
    constexpr int VEC = 16 / sizeof(G);
    __shared__ double smem[16];
    const int t = tensor_of(a.t, blockIdx.x);
    const int64_t start = (blockIdx.x - a.t.first[t]) * CHUNK;
    const int n = (int)min(CHUNK, a.t.size[t] - start);
    const G* g = static_cast<const G*>(a.g[t]) + start;
    const bool fast = aligned(g, VEC);
    double s = 0;
#pragma unroll 4
    for (int i = threadIdx.x * VEC; i < n; i += 512 * VEC) {
        Vec<G, VEC> x;
        if (fast && i + VEC <= n) x = Vec<G, VEC>::load(g + i);
        else
#pragma unroll
            for (int k = 0; k < VEC; k++) x.v[k] = i + k < n ? g[i + k] : from_float<G>(0.f);
#pragma unroll
        for (int k = 0; k < VEC; k++) { const double y = x[k]; s = fma(y, y, s); }
    }
    for (int o = 16; o; o >>= 1) s += __shfl_xor_sync(~0u, s, o);
    if ((threadIdx.x & 31) == 0) smem[threadIdx.x >> 5] = s;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < 16; w++) s += smem[w];
        part[a.t.base + blockIdx.x] = s;
    }
}
__global__ void __launch_bounds__(1024) root_of_sum(const double* __restrict__ part, int64_t parts, double* __restrict__ norm) {
    __shared__ double smem[32];
    double s = 0;
    for (int64_t i = threadIdx.x; i < parts; i += 1024) s += part[i];
    for (int o = 16; o; o >>= 1) s += __shfl_xor_sync(~0u, s, o);
    if ((threadIdx.x & 31) == 0) smem[threadIdx.x >> 5] = s;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < 32; w++) s += smem[w];
        *norm = sqrt(s);
    }
}

// One thread for each tensor: counts the step and computes its factors. A norm that is not finite, or `stop` once set, leaves all as it is.
template <int N> __global__ void prepare(const __grid_constant__ Counts<N> a, const __grid_constant__ Groups groups, const void* __restrict__ lr, int lr_kind, int64_t lr_stride,
                                         const double* __restrict__ norm, double max_norm, float* stop, int divides, Factors* __restrict__ out) {
    const int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= a.n) return;
    const double length = norm ? *norm : 0.;
    const bool ok = isfinite(length) && !(stop && *stop != 0.f);
    if (stop && !isfinite(length)) *stop = 1.f;
    Hyper h = groups.h[a.group[t]];
    if (lr_kind) h.lr = lr_kind == 1 ? (double)static_cast<const float*>(lr)[a.group[t] * lr_stride] : static_cast<const double*>(lr)[a.group[t] * lr_stride];
    const float step = *a.step[t] + 1.f;
    if (ok) *a.step[t] = step;
    Factors f = factors(h, step, length, max_norm, divides);
    f.ok = ok;
    out[a.base + t] = f;
}

template <class G, class C, int N> __global__ void __launch_bounds__(512) step_kernel(const __grid_constant__ Step<N> a, const Factors* __restrict__ all) {
    constexpr int VEC = 4;
    const int t = tensor_of(a.t, blockIdx.x);
    const Factors f = all[a.t.base + t];
    if (!f.ok) return;
    const int64_t start = (blockIdx.x - a.t.first[t]) * CHUNK;
    const int n = (int)min(CHUNK, a.t.size[t] - start);
    float *p = a.p[t] + start, *m = a.m[t] + start, *v = a.v[t] + start;
    const G* g = static_cast<const G*>(a.g[t]) + start;
    C* c = a.c[t] ? static_cast<C*>(a.c[t]) + start : nullptr;
    const int fast = aligned(p, VEC) && aligned(m, VEC) && aligned(v, VEC) && aligned(g, VEC) && aligned(c, VEC) ? n / VEC * VEC : 0;
#pragma unroll 2
    for (int i = threadIdx.x * VEC; i < fast; i += 512 * VEC) {
        Vec<float, VEC> vp = Vec<float, VEC>::load(p + i), vm = Vec<float, VEC>::load(m + i), vv = Vec<float, VEC>::load(v + i);
        const Vec<G, VEC> vg = Vec<G, VEC>::load(g + i);
        Vec<C, VEC> vc;
#pragma unroll
        for (int k = 0; k < VEC; k++) { update(vp.v[k], vm.v[k], vv.v[k], vg[k], f); vc.set(k, vp.v[k]); }
        vp.store(p + i); vm.store(m + i); vv.store(v + i);
        if (c) vc.store(c + i);
    }
    for (int i = fast + threadIdx.x; i < n; i += 512) {
        float pp = p[i], mm = m[i], vv = v[i];
        update(pp, mm, vv, to_float(g[i]), f);
        p[i] = pp; m[i] = mm; v[i] = vv;
        if (c) c[i] = from_float<C>(pp);
    }
}
#endif

using Tensors = std::vector<Tensor>;
namespace {

bool same_strides(const Tensor& a, const Tensor& b) {
    if (a.dim() != b.dim()) return false;
    for (int64_t d = 0; d < a.dim(); d++) if (a.sizes()[d] != b.sizes()[d] || (a.sizes()[d] > 1 && a.strides()[d] != b.strides()[d])) return false;
    return true;
}
Tensor dense_like(const Tensor& x, const Tensor& like) {                        // x, element for element in the memory order of `like`
    Tensor y = torch::stable::empty_like(like);
    torch::stable::copy_(y, x);
    return y;
}
bool is_dense(const Tensor& x) {                                                // no gaps and no overlaps, in any order of the axes
    std::vector<std::pair<int64_t, int64_t>> axes;
    for (int64_t d = 0; d < x.dim(); d++) if (x.sizes()[d] > 1) axes.emplace_back(x.strides()[d], x.sizes()[d]);
    std::sort(axes.begin(), axes.end());
    int64_t n = 1;
    for (auto [stride, size] : axes) { if (stride != n) return false; n *= size; }
    return true;
}

// The tensors of a step, side by side, each set in one memory order; what had to be copied goes back at the end.
struct Work {
    Tensors p, g, m, v, c, n;
    std::vector<int> group;
    std::vector<std::pair<Tensor, Tensor>> back;
    Work(const Tensors& params, const Tensors& grads, const Tensors& exp_avgs, const Tensors& exp_avg_sqs, const Tensors& copies, const Tensors& steps, const std::vector<int64_t>& ends) {
        const size_t N = params.size();
        STD_TORCH_CHECK(grads.size() == N && exp_avgs.size() == N && exp_avg_sqs.size() == N && steps.size() == N && (copies.empty() || copies.size() == N), "adamw: lists of different length");
        STD_TORCH_CHECK(!ends.empty() && ends.back() == (int64_t)N, "adamw: the groups do not cover the parameters");
        for (size_t i = 0, k = 0; i < N; i++) {
            while ((int64_t)i >= ends[k]) k++;
            Tensor q = params[i];
            STD_TORCH_CHECK(q.scalar_type() == ScalarType::Float && exp_avgs[i].scalar_type() == ScalarType::Float && exp_avg_sqs[i].scalar_type() == ScalarType::Float && steps[i].scalar_type() == ScalarType::Float,
                "adamw: masters, moments and step counts must be float32");
            if (q.numel() == 0) continue;
            for (const Tensor* x : {&grads[i], &exp_avgs[i], &exp_avg_sqs[i]}) STD_TORCH_CHECK(x->numel() == q.numel() && x->get_device_index() == q.get_device_index(), "adamw: parameter ", i, " and its gradient or moments differ in size or device");
            if (!is_dense(q)) q = replace(params[i], params[i]);
            p.push_back(q);
            g.push_back(same_strides(grads[i], q) ? grads[i] : dense_like(grads[i], q));
            m.push_back(same_strides(exp_avgs[i], q) ? exp_avgs[i] : replace(exp_avgs[i], q));
            v.push_back(same_strides(exp_avg_sqs[i], q) ? exp_avg_sqs[i] : replace(exp_avg_sqs[i], q));
            if (!copies.empty()) {
                const bool none = copies[i].scalar_type() == ScalarType::Float && copies[i].const_data_ptr() == params[i].const_data_ptr();
                STD_TORCH_CHECK(none || same_strides(copies[i], params[i]), "adamw: copy ", i, " differs from its master in shape or memory order");
                STD_TORCH_CHECK(none || same_strides(q, params[i]), "adamw: a parameter with gaps in memory cannot have a copy");
                c.push_back(none ? q : copies[i]);
            } else c.push_back(q);
            n.push_back(steps[i]);
            group.push_back((int)k);
        }
    }
    Tensor replace(const Tensor& x, const Tensor& like) { back.emplace_back(x, dense_like(x, like)); return back.back().second; }
    void finish() { for (auto& [x, y] : back) torch::stable::copy_(x, y); }
};

std::vector<Hyper> hypers(const Tensor& h, size_t groups) {
    STD_TORCH_CHECK(h.scalar_type() == ScalarType::Double && h.is_contiguous() && h.numel() == (int64_t)groups * 5, "adamw: hyper must be float64 on the CPU, 5 numbers a group");
    const double* d = static_cast<const double*>(h.const_data_ptr());
    std::vector<Hyper> r;
    for (size_t k = 0; k < groups; k++, d += 5) r.push_back({d[0], d[1], d[2], d[3], d[4]});
    return r;
}
} // namespace

#ifdef __CUDACC__
// Call f(first, last, N) for stretches of at most MANY tensors, FEW where they are enough
template <class F> static void stretches(size_t n, F f) {
    if (n <= FEW) { if (n) f(size_t(0), n, std::integral_constant<int, FEW>()); return; }
    for (size_t i = 0; i < n; i += MANY) f(i, std::min(n, i + MANY), std::integral_constant<int, MANY>());
}
template <int N> static int fill(Table<N>& t, const Tensors& x, size_t from, size_t to, int64_t base) {
    int64_t blocks = 0;
    t.n = (int)(to - from); t.base = (int)base;
    for (size_t i = from; i < to; i++) { t.first[i - from] = (int)blocks; t.size[i - from] = x[i].numel(); blocks += ceil_div(x[i].numel(), CHUNK); }
    t.first[t.n] = (int)blocks;
    return (int)blocks;
}
template <class G> static int64_t launch_norm(const Tensors& g, double* part, int64_t base, cudaStream_t s) {
    stretches(g.size(), [&](size_t from, size_t to, auto N) {
        Grads<N()> a;
        const int blocks = fill(a.t, g, from, to, base);
        for (size_t i = from; i < to; i++) a.g[i - from] = g[i].const_data_ptr();
        square_sums<G><<<blocks, 512, 0, s>>>(a, part);
        base += blocks;
    });
    return base;
}
template <class G, class C> static void launch_step(const Work& w, const std::vector<size_t>& idx, const Factors* f, int64_t base, cudaStream_t s) {
    Tensors p;
    for (size_t i : idx) p.push_back(w.p[i]);
    stretches(idx.size(), [&](size_t from, size_t to, auto N) {
        Step<N()> a;
        const int blocks = fill(a.t, p, from, to, base + (int64_t)from);
        for (size_t j = from; j < to; j++) {
            const size_t i = idx[j], k = j - from;
            a.p[k] = static_cast<float*>(w.p[i].mutable_data_ptr()); a.m[k] = static_cast<float*>(w.m[i].mutable_data_ptr()); a.v[k] = static_cast<float*>(w.v[i].mutable_data_ptr());
            a.g[k] = w.g[i].const_data_ptr();
            a.c[k] = w.c[i].const_data_ptr() == w.p[i].const_data_ptr() ? nullptr : w.c[i].mutable_data_ptr();
        }
        step_kernel<G, C><<<blocks, 512, 0, s>>>(a, f);
    });
}

// Length of all gradients together, float64
Tensor grad_norm_cuda(Tensors grads) {
    STD_TORCH_CHECK(!grads.empty(), "grad_norm: no gradients");
    Tensors f, b, h;
    int64_t parts = 0;
    for (Tensor& g : grads) {
        STD_TORCH_CHECK(g.get_device_index() == grads[0].get_device_index(), "grad_norm: gradients of several devices");
        if (g.numel() == 0) continue;
        parts += ceil_div(g.numel(), CHUNK);
        Tensor x = is_dense(g) ? g : dense_like(g, g);
        switch (g.scalar_type()) {
            case ScalarType::Float: f.push_back(x); break;
            case ScalarType::BFloat16: b.push_back(x); break;
            case ScalarType::Half: h.push_back(x); break;
            default: STD_TORCH_CHECK(false, "grad_norm: dtype must be float32, bfloat16 or float16");
        }
    }
    torch::stable::accelerator::DeviceGuard guard(grads[0].get_device_index());
    const cudaStream_t s = stream_of(grads[0]);
    Tensor part = torch::stable::new_empty(grads[0], {parts + 1}, ScalarType::Double), norm = torch::stable::new_empty(grads[0], {}, ScalarType::Double);
    double* d = static_cast<double*>(part.mutable_data_ptr());
    launch_norm<half_t>(h, d, launch_norm<bf16>(b, d, launch_norm<float>(f, d, 0, s), s), s);
    root_of_sum<<<1, 1024, 0, s>>>(d, parts, static_cast<double*>(norm.mutable_data_ptr()));
    check_launch("grad_norm");
    return norm;
}

// copies: [] or one for each parameter (the parameter itself: none). ends: the parameters of group k end at ends[k].
// hyper [groups, 5] on the CPU; lr: on the device, one for all groups or one for each, instead of hyper's. norm: as `grad_norm` gave it.
void adamw_cuda(Tensors params, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs, Tensors copies, Tensors steps, std::vector<int64_t> ends, Tensor hyper, std::optional<Tensor> lr,
                std::optional<Tensor> norm, double max_norm, std::optional<Tensor> stop, int64_t divides) {
    if (params.empty()) return;
    const Tensor& like = params[0];
    torch::stable::accelerator::DeviceGuard guard(like.get_device_index());
    const cudaStream_t s = stream_of(like);
    Work w(params, grads, exp_avgs, exp_avg_sqs, copies, steps, ends);
    if (w.p.empty()) return;
    STD_TORCH_CHECK(ends.size() <= GROUPS, "adamw: more than 32 parameter groups");
    Groups groups{};
    const std::vector<Hyper> h = hypers(hyper, ends.size());
    for (size_t k = 0; k < h.size(); k++) groups.h[k] = h[k];
    int lr_kind = 0; int64_t lr_stride = 0;
    if (lr) {
        STD_TORCH_CHECK(lr->is_contiguous() && (lr->numel() == 1 || lr->numel() == (int64_t)ends.size()) && lr->get_device_index() == like.get_device_index(), "adamw: lr must be one number, or one for each group, on the parameters' device");
        STD_TORCH_CHECK(lr->scalar_type() == ScalarType::Float || lr->scalar_type() == ScalarType::Double, "adamw: lr must be float32 or float64");
        lr_kind = lr->scalar_type() == ScalarType::Float ? 1 : 2; lr_stride = lr->numel() == 1 ? 0 : 1;
    }
    // tensors of one kind of gradient and copy stand together
    const ScalarType kinds[3] = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half};
    std::vector<size_t> sets[3][3], order;
    for (size_t i = 0; i < w.p.size(); i++) {
        int g = -1, c = -1;
        for (int k = 0; k < 3; k++) { if (w.g[i].scalar_type() == kinds[k]) g = k; if (w.c[i].scalar_type() == kinds[k]) c = k; }
        STD_TORCH_CHECK(g >= 0 && c >= 0 && (g == 0 || g == c), "adamw: a gradient must be float32 or of its copy's dtype, which is float32, bfloat16 or float16");
        sets[g][c].push_back(i);
    }
    for (auto& row : sets) for (auto& set : row) order.insert(order.end(), set.begin(), set.end());
    Tensor buffer = torch::stable::new_empty(like, {(int64_t)(w.p.size() * sizeof(Factors) / 4)}, ScalarType::Float);
    Factors* f = static_cast<Factors*>(buffer.mutable_data_ptr());
    stretches(order.size(), [&](size_t from, size_t to, auto N) {
        Counts<N()> a;
        a.n = (int)(to - from); a.base = (int)from;
        for (size_t j = from; j < to; j++) { a.step[j - from] = static_cast<float*>(w.n[order[j]].mutable_data_ptr()); a.group[j - from] = (unsigned char)w.group[order[j]]; }
        prepare<<<(int)ceil_div(a.n, 128), 128, 0, s>>>(a, groups, lr ? lr->const_data_ptr() : nullptr, lr_kind, lr_stride, norm ? static_cast<const double*>(norm->const_data_ptr()) : nullptr, max_norm,
                                                      stop ? static_cast<float*>(stop->mutable_data_ptr()) : nullptr, (int)divides, f);
    });
    int64_t base = 0;
    auto go = [&](auto G, auto C, const std::vector<size_t>& set) { launch_step<decltype(G), decltype(C)>(w, set, f, base, s); base += (int64_t)set.size(); };
    go(0.f, 0.f, sets[0][0]); go(0.f, bf16(), sets[0][1]); go(0.f, half_t(), sets[0][2]); go(bf16(), bf16(), sets[1][1]); go(half_t(), half_t(), sets[2][2]);
    check_launch("adamw_");
    w.finish();
}
STABLE_TORCH_LIBRARY_IMPL(XTRAIN_NS, CUDA, m) {
    m.impl("grad_norm", TORCH_BOX(&grad_norm_cuda));
    m.impl("adamw_", TORCH_BOX(&adamw_cuda));
}
#endif

// The same arithmetic in a plain loop, for float32 on a CPU: so that the kernel's own code is checked where there is no GPU.
Tensor grad_norm_cpu(Tensors grads) {
    STD_TORCH_CHECK(!grads.empty(), "grad_norm: no gradients");
    double s = 0;
    for (Tensor& x : grads) {
        STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float, "grad_norm: float32 only on a CPU");
        const Tensor g = is_dense(x) ? x : dense_like(x, x);
        const float* d = static_cast<const float*>(g.const_data_ptr());
        for (int64_t i = 0; i < g.numel(); i++) s = fma((double)d[i], (double)d[i], s);
    }
    Tensor norm = torch::stable::new_empty(grads[0], {}, ScalarType::Double);
    *static_cast<double*>(norm.mutable_data_ptr()) = sqrt(s);
    return norm;
}
void adamw_cpu(Tensors params, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs, Tensors copies, Tensors steps, std::vector<int64_t> ends, Tensor hyper, std::optional<Tensor> lr,
               std::optional<Tensor> norm, double max_norm, std::optional<Tensor> stop, int64_t divides) {
    if (params.empty()) return;
    STD_TORCH_CHECK(!lr && copies.empty(), "adamw: no lr tensor and no copies on a CPU");
    Work w(params, grads, exp_avgs, exp_avg_sqs, copies, steps, ends);
    const std::vector<Hyper> h = hypers(hyper, ends.size());
    const double length = norm ? *static_cast<const double*>(norm->const_data_ptr()) : 0.;
    float* flag = stop ? static_cast<float*>(stop->mutable_data_ptr()) : nullptr;
    const bool ok = std::isfinite(length) && !(flag && *flag != 0.f);
    if (flag && !std::isfinite(length)) *flag = 1.f;
    if (!ok) return;
    for (size_t i = 0; i < w.p.size(); i++) {
        STD_TORCH_CHECK(w.g[i].scalar_type() == ScalarType::Float, "adamw: float32 only on a CPU");
        float* step = static_cast<float*>(w.n[i].mutable_data_ptr());
        const Factors f = factors(h[w.group[i]], *step += 1.f, length, max_norm, (int)divides);
        float *p = static_cast<float*>(w.p[i].mutable_data_ptr()), *m = static_cast<float*>(w.m[i].mutable_data_ptr()), *v = static_cast<float*>(w.v[i].mutable_data_ptr());
        const float* g = static_cast<const float*>(w.g[i].const_data_ptr());
        for (int64_t k = 0; k < w.p[i].numel(); k++) update(p[k], m[k], v[k], g[k], f);
    }
    w.finish();
}
STABLE_TORCH_LIBRARY_IMPL(XTRAIN_NS, CPU, m) {
    m.impl("grad_norm", TORCH_BOX(&grad_norm_cpu));
    m.impl("adamw_", TORCH_BOX(&adamw_cpu));
}

STABLE_TORCH_LIBRARY_FRAGMENT(XTRAIN_NS, m) {
    m.def("grad_norm(Tensor[] grads) -> Tensor");
    m.def("adamw_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] copies, Tensor(e!)[] steps, int[] ends, Tensor hyper, Tensor? lr, Tensor? norm, float max_norm, "
          "Tensor(f!)? stop, int divides) -> ()");
}
