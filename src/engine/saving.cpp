#include "engine/saving.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <deque>
#include <filesystem>

#include "engine/impl.h"
#include "watch/road.h"

namespace plumb {

struct Saving::Taken {
  std::vector<SavedItem> items;
  save::Manifest manifest;
};

namespace {

std::string numbered(int number) {
  const std::string digits = std::to_string(number);
  return std::string(digits.size() < 5 ? 5 - digits.size() : 0, '0') + digits;
}

// The same folder wherever the process works when its files are written.
std::string absolute(const std::string& folder) {
  std::error_code ignored;
  const std::string found = folder.empty() ? folder : std::filesystem::absolute(folder, ignored).string();
  return found.empty() ? folder : found;
}

}  // namespace

Where Saving::here(const std::string& what) const { return impl_.reducer->here(Where::Kind::step, what); }

// Rank 0 makes room on the disk, and everybody sees it: where the files go.
std::string Saving::prepare(const std::string& folder, const SaveOptions& options, const std::string& refusal,
                            When when) {
  writer_ = nullptr;
  const std::string steps = std::to_string(impl_.reducer->steps()), samples = std::to_string(options.samples);
  impl_.reducer->serve_gathers(here("save()"));
  const Outcome mine = attempt([&] {
    road_of(impl_.world).pass(Point::save);
    if (when == When::between_steps) {
      impl_.reducer->check_between_steps("save()", Reducer::Cleared::is_enough);
    } else if (torch::autograd::get_current_graph_task_id() >= 0) {
      throw Error("save() inside of a backward; call it when the backward has ended");
    }
    if (impl_.in_step) throw Error("save() inside of a step; end_step() ends it");
    if (!refusal.empty()) throw Error(refusal);
    if (options.samples < 0 || options.keep < 0) {
      throw Error("save() with samples " + std::to_string(options.samples) + " and keep " +
                  std::to_string(options.keep) + "; both must be at least 0");
    }
    for (const std::string& name : options.leave_out) {
      const bool frozen = std::any_of(impl_.parameters.begin(), impl_.parameters.end(), [&](const auto& one) {
        return one.first == name && !one.second.requires_grad();
      });
      if (!frozen) throw Error("leave_out names '" + name + "', which is no frozen parameter of this engine");
    }
    return impl_.world.rank() == 0 ? steps + " " + samples + "/" + begin_files(folder) : steps;
  });
  try {
    const std::string first = share_outcome(impl_.world, mine, here("save()"))[0];
    const size_t blank = first.find(' '), slash = first.find('/');
    const std::string theirs = first.substr(0, blank), used = first.substr(blank + 1, slash - blank - 1);
    const std::string path = folder + first.substr(slash);
    const Outcome seen = attempt([&] {
      if (steps != theirs) throw Error("save() after " + steps + " steps, and rank 0 after " + theirs);
      if (samples != used) {
        throw Error("save() with samples " + samples + ", and rank 0 with " + used +
                    "; it is one cursor: how many all ranks together have used");
      }
      if (!save::is_folder(path)) {
        throw Error("'" + path +
                    "', which rank 0 made, is not to be seen here; checkpoints need a folder that all ranks share");
      }
      return std::string();
    });
    share_outcome(impl_.world, seen, here("save()"));
    return path;
  } catch (const RankFailed& failure) {
    if (writer_ != nullptr) writer_->abandon();
    throw SaveError(impl_.world.rank(), failure.what());
  } catch (...) {
    if (writer_ != nullptr) writer_->abandon();
    throw;
  }
}

// On rank 0: the name, in `folder`, of the folder that the files of a new checkpoint go to.
std::string Saving::begin_files(const std::string& folder) {
  // One name for one folder, however it is spelled.
  std::error_code ignored;
  save::make_folder(folder);
  const std::string root = std::filesystem::canonical(folder, ignored).string();
  const std::string& name = root.empty() ? folder : root;
  if (!writers_.contains(name)) writers_.emplace(name, std::make_unique<save::Writer>(folder));
  save::Writer& writer = *writers_.at(name);
  const std::string path = writer.begin();
  writer_ = &writer;
  return std::filesystem::path(path).filename().string();
}

void Saving::begin(const std::string& folder, const SaveOptions& options, const Outer* outer, Copy copy,
                   const NamedTensors& generators, const std::string& refusal, When when) {
  advance(Wait::yes);
  saved_.clear();
  // A folder for each checkpoint would hold a file open for each.
  std::erase_if(writers_, [this](const auto& entry) { return entry.second.get() != writer_; });
  folder_ = folder;
  root_ = absolute(folder);
  const std::string path = prepare(root_, options, refusal, when);
  keep_ = options.keep;
  Taken taken;
  // From here on a failure is this rank's word when the ranks speak next.
  const std::string failure = attempt([&] {
                                if (impl_.units) impl_.units->begin_update();
                                road_of(impl_.world).pass(Point::snapshot);
                                taken = take(options, outer, copy, generators);
                                return std::string();
                              }).error;
  try {
    if (impl_.units) impl_.units->end_update();
  } catch (...) {  // the others are gone
    if (writer_ != nullptr) writer_->abandon();
    throw;
  }
  phase_ = Phase::writing;
  path_ = path;
  task_ = std::make_unique<Task>(
      [this, taken = std::move(taken), path, end = ending(), failure]() mutable {
        if (!failure.empty()) throw std::runtime_error(failure);
        before_writing();
        road_of(impl_.world).beside(Point::write);
        copies_.finish();
        return write_items(std::move(taken.items), std::move(taken.manifest), path, end);
      },
      copy == Copy::no ? alone() : Task::Runs::beside);
}

std::string Saving::write_alone(const std::string& folder, int64_t samples) {
  Taken taken = take({.samples = samples}, nullptr, Copy::no, {});
  return write_items(std::move(taken.items), std::move(taken.manifest), folder, ending());
}

// What this rank is to write, as it is now.
Saving::Taken Saving::take(const SaveOptions& options, const Outer* outer, Copy copy, const NamedTensors& generators) {
  at::NoGradGuard no_grad;
  std::deque<Bucket>& buckets = impl_.reducer->buckets();
  for (Bucket& bucket : buckets) bucket.lanes.begin_all(bucket.device());
  Taken taken{items_of(impl_, options, outer, generators), manifest_of(impl_, options, outer)};
  if (copy == Copy::yes) {
    ToCopy tensors;
    for (SavedItem& item : taken.items) {
      auto& kind = item.changed_by == SavedItem::ChangedBy::anybody ? tensors.now
                   : item.changed_by == SavedItem::ChangedBy::torch ? tensors.held
                                                                    : tensors.later;
      kind.push_back(&item.memory);
    }
    copies_.take(tensors);
  } else {
    for (SavedItem& item : taken.items) item.memory = item.memory.to(at::kCPU).contiguous();
  }
  for (Bucket& bucket : buckets) bucket.lanes.end_all(bucket.device());
  return taken;
}

// A rank that is waited for by nobody needs no thread for what it waits for itself.
Task::Runs Saving::alone() const { return impl_.world.size() > 1 ? Task::Runs::beside : Task::Runs::at_once; }

std::string Saving::ending() const {
  return "-" + numbered(impl_.world.rank()) + "-of-" + numbered(impl_.world.size()) + ".safetensors";
}

void Saving::go_on(Wait wait) {
  if (phase_ == Phase::writing) {
    const auto texts = together(impl_.world, *task_, wait, here("save()"));
    if (!texts) return;
    phase_ = Phase::committing;
    task_ = std::make_unique<Task>(
        [this, texts = impl_.world.rank() == 0 ? *texts : std::vector<std::string>{}] {
          road_of(impl_.world).beside(Point::commit);
          if (texts.empty()) return std::string();
          save::Manifest whole = save::Manifest::read(texts[0], "rank 0's part", save::Manifest::Coverage::some);
          for (size_t rank = 1; rank < texts.size(); ++rank) {
            whole.join(save::Manifest::read(texts[rank], "rank " + std::to_string(rank) + "'s part",
                                            save::Manifest::Coverage::some));
          }
          save::Manifest::read(whole.write(), "the new manifest");  // what nobody wrote is noticed now
          return writer_->commit(whole, keep_);
        },
        wait == Wait::yes ? alone() : Task::Runs::beside);
  }
  const auto texts = together(impl_.world, *task_, wait, here("save()"));
  if (!texts) return;
  rest();
  const std::string& root = absolute(folder_) == root_ ? folder_ : root_;
  saved_ = root + "/" + std::filesystem::path((*texts)[0]).filename().string();
}

// Nothing is under way.
void Saving::rest() {
  task_.reset();
  path_.clear();
  copies_.let_go();
  road_of(impl_.world).beside(Point::none);
}

void Saving::advance(Wait wait) {
  if (path_.empty()) return;
  std::string failure;
  try {
    return go_on(wait);
  } catch (const RankFailed& error) {
    failure = error.what();
  }
  rest();
  if (writer_ != nullptr) writer_->abandon();
  throw SaveError(impl_.world.rank(), failure);
}

std::string Saving::finish() {
  advance(Wait::yes);
  return saved_;
}

Saving::~Saving() {
  if (path_.empty()) return;
  task_->wait();
  const bool complete = phase_ == Phase::committing && task_->outcome().error.empty();
  task_.reset();
  if (writer_ == nullptr || complete) return;
  writer_->abandon();
  TORCH_WARN("plumb: a checkpoint into '", folder_, "' was under way when its engine ended, and is lost; call ",
             "engine.finish_save() first. Earlier ones are intact.");
}

}  // namespace plumb
