#include "grad/trace.h"

#include <c10/util/Backtrace.h>
#include <c10/util/Lazy.h>
#include <c10/util/Logging.h>

#include <memory>
#include <string>
#include <utility>

namespace plumb::trace {
namespace {

// The frames of an error, made when somebody reads them.
class Frames final : public c10::OptimisticLazyValue<std::string> {
 public:
  explicit Frames(c10::Backtrace all) : all_(std::move(all)) {}

 private:
  // A storage without memory refuses with the message that its owner left there: where in libtorch it did says nothing.
  std::string compute() const override {
    const std::string& text = all_->get();
    return text.find("throw_data_ptr_access_error") == std::string::npos ? text : std::string();
  }

  c10::Backtrace all_;
};

}  // namespace

void install() {
  c10::SetStackTraceFetcher(
      []() -> c10::Backtrace { return std::make_shared<Frames>(c10::get_lazy_backtrace(/*frames_to_skip=*/2)); });
}

}  // namespace plumb::trace
