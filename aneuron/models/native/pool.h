// Threads that work on one step together. None waits for a thread that has not come yet: what it
// does not take, the others do. So one that waits for a core, which another thread has, perhaps this
// process's own event loop, holds nobody up unless it was interrupted amid its work, or on its way
// in: a run ends when all that came in are out.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "simd.h"

namespace aneuron {

// Numbers 0..total-1, handed out in runs: a thread that is late gets fewer, or none.
class Share {
 public:
  void reset() {
    next_.store(0, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
  }

  // Takes the next run; false when there is none.
  bool take(int total, int run, int& begin, int& end) {
    if (next_.load(std::memory_order_relaxed) >= total) return false;
    begin = next_.fetch_add(run, std::memory_order_relaxed);
    if (begin >= total) return false;
    end = begin + run < total ? begin + run : total;
    return true;
  }

  // Notes that `count` more are done; returns how many are.
  int add(int count) { return done_.fetch_add(count) + count; }

  int done() const { return done_.load(); }

 private:
  alignas(64) std::atomic<int> next_{0};
  std::atomic<int> done_{0};
};

// Calls `task` in the caller's thread and in those of a pool that come before it ends.
class Pool {
 public:
  explicit Pool(int num_threads) : num_threads_(num_threads < 1 ? 1 : num_threads) {
    try {
      for (int thread = 1; thread < num_threads_; ++thread)
        threads_.emplace_back([this, thread] { serve(thread); });
    } catch (...) {
      end();
      throw;
    }
  }

  ~Pool() { end(); }

  int num_threads() const { return num_threads_; }

  // `task` must be done when it returns in one thread, whichever that is.
  template <typename Task>
  void run(Task& task) {
    if (num_threads_ == 1) return task(0);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      call_ = [](void* it, int thread) { (*static_cast<Task*>(it))(thread); };
      task_ = &task;
      is_open_ = true;
      ++turn_;
    }
    news_.notify_all();
    task(0);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      is_open_ = false;
    }
    wait([this] { return inside_.load() == 0; });
  }

  // Waits until all of a share is done, `mine` of it by this thread; what was written then can be
  // read behind it.
  void meet(Share& share, int mine, int total) {
    if (num_threads_ == 1) return;
    if (mine > 0 && share.add(mine) == total) return tell();
    wait([&] { return share.done() == total; });
  }

 private:
  static constexpr int kSpins = 1000;  // some 25 us; work is seldom that uneven

  // Waits until `is_so`, which another thread makes true before it tells. Spins at first; then the
  // other was most likely interrupted, and may go on on this core if that is let go.
  //
  // No word is lost: both sides' accesses are sequentially consistent, so that either the other
  // thread finds this one waiting, or this one finds what the other has done.
  template <typename IsSo>
  void wait(IsSo&& is_so) {
    for (int spins = 0; spins < kSpins; ++spins) {
      if (is_so()) return;
      pause();
    }
    std::unique_lock<std::mutex> lock(told_mutex_);
    waiting_.fetch_add(1);
    told_.wait(lock, is_so);
    waiting_.fetch_sub(1);
  }

  void tell() {
    if (waiting_.load() == 0) return;
    { std::lock_guard<std::mutex> lock(told_mutex_); }  // it has looked, and sleeps
    told_.notify_all();
  }

  void end() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      is_closed_ = true;
    }
    news_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void serve(int thread) {
    unsigned seen = 0;
    for (;;) {
      {
        std::unique_lock<std::mutex> lock(mutex_);
        news_.wait(lock, [&] { return is_closed_ || (is_open_ && turn_ != seen); });
        if (is_closed_) return;
        seen = turn_;
        inside_.fetch_add(1);
      }
      call_(task_, thread);
      if (inside_.fetch_sub(1) == 1) tell();
    }
  }

  const int num_threads_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;  // of what says who works on what
  std::condition_variable news_;
  bool is_closed_ = false;
  bool is_open_ = false;  // whether threads may still come in
  unsigned turn_ = 0;
  void (*call_)(void*, int) = nullptr;
  void* task_ = nullptr;
  std::mutex told_mutex_;
  std::condition_variable told_;
  alignas(64) std::atomic<int> inside_{0};  // threads beside the caller's
  alignas(64) std::atomic<int> waiting_{0};
};

}  // namespace aneuron
