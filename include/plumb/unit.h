// Unit: a module whose parameters are gathered before use and released after, where a strategy shards parameters.
//
//   struct NetImpl : torch::nn::Module {
//     plumb::Unit<Block> block{nullptr};                 // was: Block block{nullptr};
//     at::Tensor forward(at::Tensor x) { return block->forward(x); }
//   };
//
// A holder like libtorch's own: `->` and `()` gather for as long as the full expression lasts. A backward gathers by
// itself whatever it needs, as often as a graph is walked. Without an engine, or with parameters that are whole, a unit
// is its module and nothing more. Parameters of no unit stay whole on every rank.
#pragma once

#include <plumb/world.h>

#include <torch/nn/pimpl.h>

#include <concepts>
#include <memory>
#include <utility>

namespace torch::nn {
class Module;
}

namespace plumb {
namespace unit {

// Where the holders of a module and the engine that shards it meet.
struct Door;
std::shared_ptr<Door> door_of(const std::shared_ptr<torch::nn::Module>& module);

}  // namespace unit

// While it lives, a unit's parameters are whole.
class UnitScope {
 public:
  explicit UnitScope(const std::shared_ptr<unit::Door>& door);
  ~UnitScope();
  UnitScope(const UnitScope&) = delete;
  UnitScope& operator=(const UnitScope&) = delete;

 private:
  std::shared_ptr<void> units_;  // of the engine; null: nothing to gather
  int unit_ = -1;
};

namespace unit {

template <class M>
struct Contained {
  using type = M;
};
template <class M>
  requires requires { typename M::ContainedType; }
struct Contained<M> {
  using type = typename M::ContainedType;
};

// What `->` gives: the module, gathered until the full expression ends.
template <class M>
class Arrow {
 public:
  Arrow(const std::shared_ptr<Door>& door, M* module) : scope_(door), module_(module) {}
  M* operator->() const { return module_; }

 private:
  UnitScope scope_;
  M* module_;
};

}  // namespace unit

// `M` is a module or its holder: Unit<BlockImpl> and Unit<Block> are the same.
template <class M>
class Unit : public torch::nn::ModuleHolder<typename unit::Contained<M>::type> {
 public:
  using Module = typename unit::Contained<M>::type;
  using Holder = torch::nn::ModuleHolder<Module>;

  Unit(std::nullptr_t) : Holder(nullptr) {}
  Unit(std::shared_ptr<Module> module) : Holder(std::move(module)), door_(unit::door_of(this->impl_)) {}
  Unit(const Holder& holder) : Unit(holder.ptr()) {}
  template <class... Args>
    requires(sizeof...(Args) > 0 && !(std::derived_from<std::remove_cvref_t<Args>, Holder> && ...) &&
             std::constructible_from<Module, Args...>)
  explicit Unit(Args&&... args) : Unit(std::make_shared<Module>(std::forward<Args>(args)...)) {}

  unit::Arrow<Module> operator->() { return {door_, this->get()}; }
  unit::Arrow<const Module> operator->() const { return {door_, this->get()}; }

  template <class... Args>
  auto operator()(Args&&... args) {
    UnitScope scope(door_);
    return this->get()->forward(std::forward<Args>(args)...);
  }

 private:
  std::shared_ptr<unit::Door> door_;
};

// While it lives, on this thread, every unit that is built keeps only this rank's part of its parameters: a model larger
// than one rank's memory is built unit by unit, with the values that an unsharded model with the same seed has.
//
//   torch::manual_seed(1);                 // alike on every rank
//   plumb::Deferred deferred(world);
//   Net net;                               // whose plumb::Unit members are cut as they are made
//   plumb::Engine engine(world, *net, plumb::AdamW{}, {.strategy = "zero3"});
//
// A parameter must have its value before its Unit is made; using it between there and the engine is an error.
class Deferred {
 public:
  explicit Deferred(const World& world);
  ~Deferred();
  Deferred(const Deferred&) = delete;
  Deferred& operator=(const Deferred&) = delete;

 private:
  World world_;
  const World* before_;
};

}  // namespace plumb
