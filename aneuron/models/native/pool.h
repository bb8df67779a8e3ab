// Threads that work on one step together: woken once, then kept in step by barriers that spin.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "simd.h"

namespace aneuron {

// Calls `task` in all threads of a pool, the caller's own among them.
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

  template <typename Task>
  void run(Task& task) {
    call_ = [](void* it, int thread) { (*static_cast<Task*>(it))(thread); };
    task_ = &task;
    arrived_.store(0, std::memory_order_relaxed);
    if (num_threads_ > 1) {
      running_.store(num_threads_ - 1, std::memory_order_relaxed);
      {
        std::lock_guard<std::mutex> lock(mutex_);
        ++turn_;
      }
      news_.notify_all();
    }
    call_(task_, 0);
    while (running_.load(std::memory_order_acquire)) relax();
  }

  // Waits until all threads are here; what they wrote before can be read behind it.
  void meet() {
    if (num_threads_ == 1) return;
    unsigned round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == num_threads_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round_.load(std::memory_order_acquire) == round; ++spins) {
      // The other one may have been preempted by this very processor's event loop.
      if (spins < kSpins) pause(); else std::this_thread::yield();
    }
  }

 private:
  static constexpr int kSpins = 4000;

  void end() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      is_closed_ = true;
    }
    news_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void relax() {
    for (int spins = 0; spins < kSpins && running_.load(std::memory_order_acquire); ++spins) pause();
    if (running_.load(std::memory_order_acquire)) std::this_thread::yield();
  }

  void serve(int thread) {
    unsigned seen = 0;
    for (;;) {
      {
        std::unique_lock<std::mutex> lock(mutex_);
        news_.wait(lock, [&] { return is_closed_ || turn_ != seen; });
        if (is_closed_) return;
        seen = turn_;
      }
      call_(task_, thread);
      running_.fetch_sub(1, std::memory_order_release);
    }
  }

  const int num_threads_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable news_;
  bool is_closed_ = false;
  unsigned turn_ = 0;
  void (*call_)(void*, int) = nullptr;
  void* task_ = nullptr;
  alignas(64) std::atomic<int> running_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> round_{0};
};

// Numbers 0..total-1, handed out in runs: a thread that is late gets fewer.
class Share {
 public:
  void reset() { next_.store(0, std::memory_order_relaxed); }

  // Takes the next run; false when there is none.
  bool take(int total, int run, int& begin, int& end) {
    begin = next_.fetch_add(run, std::memory_order_relaxed);
    if (begin >= total) return false;
    end = begin + run < total ? begin + run : total;
    return true;
  }

 private:
  alignas(64) std::atomic<int> next_{0};
};

}  // namespace aneuron
