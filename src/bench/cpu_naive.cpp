#include "bench/cpu_naive.h"

#include <functional>
#include <oneapi/dnnl/dnnl.hpp>

#include "core/check.h"
#include "serving/openmp.h"

namespace foveal::bench {
namespace {

void require(dnnl_status_t status, const char* call) {
  if (status != dnnl_success) {
    fail(ErrorCode::device, "oneDNN's {} gave status {}", call, static_cast<int>(status));
  }
}

dnnl::softmax_forward make_softmax(const dnnl::engine& engine, const dnnl::memory::desc& scores) {
#if DNNL_VERSION_MAJOR >= 3
  return dnnl::softmax_forward({engine, dnnl::prop_kind::forward_inference,
                                dnnl::algorithm::softmax_accurate, scores, scores, 1});
#else
  return dnnl::softmax_forward(
      {dnnl::softmax_forward::desc(dnnl::prop_kind::forward_inference, scores, 1), engine});
#endif
}

}  // namespace

struct CpuNaive::Softmax {
  std::int64_t rows;
  std::int64_t keys;
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::memory::desc scores{
      {rows, keys}, dnnl::memory::data_type::f32, dnnl::memory::format_tag::ab};
  dnnl::softmax_forward primitive = make_softmax(engine, scores);
};

CpuNaive::CpuNaive(const NaiveProblem& problem) {
  if (problem.dtype != DType::f32) {
    fail(ErrorCode::unsupported, "dtype is {}, naive on the CPU takes f32",
         to_string(problem.dtype));
  }
  serving::keep_openmp_to_one_thread();
  softmax_.reset(new Softmax{.rows = problem.rows, .keys = problem.keys});
}

CpuNaive::~CpuNaive() = default;

bool CpuNaive::fits(const NaiveProblem& problem) const {
  return softmax_->rows == problem.rows && softmax_->keys == problem.keys;
}

void CpuNaive::run(const NaiveProblem& p, ThreadPool& threads) const {
  const auto head = [&](std::int64_t h, int) {
    serving::keep_openmp_to_one_thread();
    const float* query = static_cast<const float*>(p.query) + h * p.rows * p.head_size;
    const float* key = static_cast<const float*>(p.key) + h * p.keys * p.head_size;
    const float* value = static_cast<const float*>(p.value) + h * p.keys * p.head_size;
    float* output = static_cast<float*>(p.output) + h * p.rows * p.head_size;
    float* scores = static_cast<float*>(p.scores) + h * p.rows * p.keys;
    require(dnnl_sgemm('N', 'T', p.rows, p.keys, p.head_size, p.scale, query, p.head_size, key,
                       p.head_size, 0.0F, scores, p.keys),
            "sgemm");
    dnnl::stream stream(softmax_->engine);
    dnnl::memory memory(softmax_->scores, softmax_->engine, scores);
    softmax_->primitive.execute(stream, {{DNNL_ARG_SRC, memory}, {DNNL_ARG_DST, memory}});
    stream.wait();
    require(dnnl_sgemm('N', 'N', p.rows, p.head_size, p.keys, 1.0F, scores, p.keys, value,
                       p.head_size, 0.0F, output, p.head_size),
            "sgemm");
  };
  threads.parallel_for(p.heads, std::ref(head));
}

}  // namespace foveal::bench
