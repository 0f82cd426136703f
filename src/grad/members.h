// Members: who takes part. Every parameter that is or was to be trained has a sink, and the sink's hooks hear of every
// gradient that autograd, or an operation that writes gradients itself, has for it.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "grad/sink.h"
#include "plumb/engine.h"
#include "plumb/fused.h"

namespace plumb {

// Where gradients come in: what the hooks of a sink call. Calls may come from several threads.
class Entrances {
 public:
  virtual ~Entrances() = default;
  // Before autograd accumulates; what is returned is accumulated into .grad.
  virtual at::Tensor before_accumulation(Sink& sink, const at::Tensor& gradient) = 0;
  // After it has, with the gradient that came.
  virtual void after_accumulation(Sink& sink, const at::Tensor& gradient) = 0;
  // The gradients of this sink come from another node from now on.
  virtual void accumulator_changed(Sink& sink) = 0;
  // An operation writes the gradient itself: where to, and that it did.
  virtual GradTarget open_fused(Sink& sink) = 0;
  virtual void wrote_fused(Sink& sink) = 0;
  // One that was put off has been written.
  virtual void made_up_fused(Sink& sink) = 0;
};

class Members {
 public:
  // `unit_of`: by parameter, the unit that gathers it; -1 for one that is always whole.
  Members(int rank, NamedTensors candidates, std::vector<int> unit_of, std::optional<at::ScalarType> accumulate);

  ~Members();
  Members(const Members&) = delete;
  Members& operator=(const Members&) = delete;

  // Hooks call these from now on, for as long as they live.
  void report_to(std::weak_ptr<Entrances> entrances) { entrances_ = std::move(entrances); }

  std::deque<Sink>& sinks() { return sinks_; }
  const std::deque<Sink>& sinks() const { return sinks_; }

  // Candidates that require or have a gradient, or belong to a unit, and have no sink yet; and a digest of them, 0: none.
  std::vector<int> newcomers() const;
  int64_t newcomers_digest() const;
  // Gives them sinks, in this order; the sinks' indices.
  std::vector<int> admit(const std::vector<int>& candidates);

  // A parameter that can have an accumulator only now gets its hooks now.
  void hook(Sink& sink);
  // Hears of a new accumulator of its parameter, whatever hooks the user registers or removes; for between two passes.
  void watch(Sink& sink);
  // A parameter that was given other memory (torch::load) or another dtype for a while has a new accumulator, which knows
  // nothing of us.
  void follow_accumulator(Sink& sink);

  // Whether nobody but us listens to what comes to this leaf through `accumulator`.
  bool alone(const Sink& sink, const torch::autograd::Node& accumulator) const;

  const std::vector<std::string>& names() const { return names_; }  // by sink
  // An Error if it is no parameter of this engine.
  const std::string& name_of(const at::Tensor& parameter) const;
  // Null while it has never required a gradient. An Error if it is no parameter of this engine.
  Sink* find(const at::Tensor& parameter);

 private:
  size_t candidate(const at::Tensor& parameter) const;
  void listen_to(Sink& sink, const NodePtr& accumulator);
  void offer_fused(Sink& sink);

  const int rank_;
  const std::optional<at::ScalarType> accumulate_;
  const NamedTensors candidates_;                         // everything that could be trained
  std::unordered_map<const void*, size_t> candidate_of_;  // by parameter
  const std::vector<int> unit_of_;                        // by candidate
  std::vector<int> sink_of_;                              // by candidate; -1: none yet
  std::deque<Sink> sinks_;                                // stable addresses: hooks and buckets point here
  std::vector<std::string> names_;                        // of the sinks: every pass hands them to its checks
  std::weak_ptr<Entrances> entrances_;
};

}  // namespace plumb
