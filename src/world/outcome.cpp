#include "world/outcome.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "watch/report.h"

namespace plumb {

Outcome attempt(const std::function<std::string()>& work) {
  try {
    return {work(), ""};
  } catch (const c10::Error& error) {  // where it was raised is nothing to the user
    return {"", error.what_without_backtrace()};
  } catch (const std::exception& error) {
    const std::string what = error.what();
    return {"", what.empty() ? "an unknown error" : what};
  } catch (...) {  // of the user's own functions
    return {"", "an exception that is no std::exception"};
  }
}

std::vector<std::string> share_outcome(const World& world, const Outcome& mine, const Where& where) {
  const bool good = mine.error.empty();
  std::vector<std::string> all =
      exchange_text(world, where.detail + (good ? "\n+" : "\n-") + (good ? mine.text : mine.error), where);
  for (int rank = 0; rank < world.size(); ++rank) {
    std::string& text = all[rank];
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string theirs = text.substr(0, end);
    text.erase(0, end + 1);
    if (theirs == where.detail) continue;
    const std::string why = "rank " + std::to_string(rank) + " called " + theirs + " where rank " +
                            std::to_string(world.rank()) + " called " + where.detail +
                            "; every rank must call the same, in the same order";
    throw RankFailed(where.detail + " failed: " + why, rank, why);
  }
  for (int rank = 0; rank < world.size(); ++rank) {
    std::string& text = all[rank];
    const bool well = text.starts_with('+');
    if (!text.empty()) text.erase(0, 1);
    if (well) continue;
    const std::string why = without_prefix(text);
    throw RankFailed(
        where.detail + " failed" + (world.size() > 1 ? " on rank " + std::to_string(rank) : "") + ": " + why, rank,
        why);
  }
  return all;
}

}  // namespace plumb
