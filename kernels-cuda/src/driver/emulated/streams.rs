//! Streams and events of the emulated device: each stream is a thread that does one thing after another.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

/// Locks also after a panic elsewhere: what is guarded here is consistent at every moment.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    busy: bool,
    closed: bool,
}

#[derive(Default)]
struct Line {
    queue: Mutex<Queue>,
    changed: Condvar,
}

/// A thread with a queue. Dropping it waits for the queue to end.
pub struct StreamThread {
    line: Arc<Line>,
    thread: Option<JoinHandle<()>>,
}

impl StreamThread {
    pub fn new() -> std::io::Result<Self> {
        let line = Arc::new(Line::default());
        let of_thread = Arc::clone(&line);
        let thread = std::thread::Builder::new()
            .name("emulated-stream".to_owned())
            .spawn(move || work(&of_thread))?;
        Ok(Self {
            line,
            thread: Some(thread),
        })
    }

    pub fn push(&self, job: impl FnOnce() + Send + 'static) {
        lock(&self.line.queue).jobs.push_back(Box::new(job));
        self.line.changed.notify_all();
    }

    /// Waits until the queue is empty and its last job has ended.
    pub fn drain(&self) {
        let queue = lock(&self.line.queue);
        let waits = |q: &mut Queue| q.busy || !q.jobs.is_empty();
        drop(
            self.line
                .changed
                .wait_while(queue, waits)
                .unwrap_or_else(PoisonError::into_inner),
        );
    }
}

fn work(line: &Line) {
    let mut queue = lock(&line.queue);
    loop {
        if let Some(job) = queue.jobs.pop_front() {
            queue.busy = true;
            drop(queue);
            job();
            queue = lock(&line.queue);
            queue.busy = false;
            line.changed.notify_all();
        } else if queue.closed {
            return;
        } else {
            queue = line.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for StreamThread {
    fn drop(&mut self) {
        lock(&self.line.queue).closed = true;
        self.line.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has been printed; there is nobody to hand it to.
            let _ = thread.join();
        }
    }
}

#[derive(Default)]
struct Marks {
    recorded: u64,
    passed: u64,
    when: Option<Instant>,
}

/// A mark that may be set again and again; only the last setting counts.
#[derive(Default)]
pub struct EventMark {
    marks: Mutex<Marks>,
    changed: Condvar,
}

impl EventMark {
    /// A new setting; the stream passes it later.
    pub fn record(&self) -> u64 {
        let mut marks = lock(&self.marks);
        marks.recorded += 1;
        marks.recorded
    }

    pub fn pass(&self, setting: u64) {
        let mut marks = lock(&self.marks);
        if setting > marks.passed {
            marks.passed = setting;
            marks.when = Some(Instant::now());
        }
        self.changed.notify_all();
    }

    /// The last setting.
    pub fn setting(&self) -> u64 {
        lock(&self.marks).recorded
    }

    pub fn wait(&self, setting: u64) {
        let marks = lock(&self.marks);
        drop(
            self.changed
                .wait_while(marks, |m| m.passed < setting)
                .unwrap_or_else(PoisonError::into_inner),
        );
    }

    /// Whether the last setting, if any, has been passed.
    pub fn passed(&self) -> bool {
        let marks = lock(&self.marks);
        marks.passed == marks.recorded
    }

    /// When the last setting was passed.
    pub fn when(&self) -> Option<Instant> {
        let marks = lock(&self.marks);
        marks.when.filter(|_| marks.passed == marks.recorded)
    }
}
