//! Memory of this process, as the system counts it.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use serde::Serialize;

/// Resident memory. `None` where the system does not tell (it is not 0 then).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ResidentMemory {
    /// Peak of all resident pages since the process started (`VmHWM`), mapped files included.
    pub peak_bytes: Option<u64>,
    /// Resident pages that belong to no file (`RssAnon`), now.
    pub anonymous_bytes: Option<u64>,
}

impl ResidentMemory {
    /// Reads the counters of this process; Linux only.
    #[must_use]
    pub fn now() -> Self {
        fs::read_to_string("/proc/self/status").map_or_else(|_| Self::default(), |s| Self::parse(&s))
    }

    fn parse(status: &str) -> Self {
        let field = |name: &str| {
            let line = status
                .lines()
                .find_map(|l| l.strip_prefix(name)?.strip_prefix(':'))?;
            let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
            kib.checked_mul(1024)
        };
        Self {
            peak_bytes: field("VmHWM"),
            anonymous_bytes: field("RssAnon"),
        }
    }
}

/// Follows the peak of anonymous memory, which the system keeps no record of, by looking every 5 ms.
#[derive(Debug)]
pub struct AnonymousPeak {
    peak: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl AnonymousPeak {
    /// Starts to watch.
    #[must_use]
    pub fn watch() -> Self {
        let (peak, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (p, s) = (peak.clone(), stop.clone());
        let thread = thread::Builder::new()
            .name("memory-watch".into())
            .spawn(move || {
                while !s.load(Ordering::Relaxed) {
                    p.fetch_max(
                        ResidentMemory::now().anonymous_bytes.unwrap_or(0),
                        Ordering::Relaxed,
                    );
                    thread::sleep(Duration::from_millis(5));
                }
            })
            .ok();
        Self { peak, stop, thread }
    }

    /// Largest value seen until now, or `None` where the system does not tell.
    #[must_use]
    pub fn peak_bytes(&self) -> Option<u64> {
        let now = ResidentMemory::now().anonymous_bytes?;
        Some(self.peak.fetch_max(now, Ordering::Relaxed).max(now))
    }
}

impl Drop for AnonymousPeak {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // The watcher cannot panic; nothing is lost if it did.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_by_their_whole_name_and_absence_is_none() {
        let got = ResidentMemory::parse("VmHWM:\t    2048 kB\nVmRSS:\t 9 kB\nRssAnon:\t     100 kB\n");
        assert_eq!(
            got,
            ResidentMemory {
                peak_bytes: Some(2048 << 10),
                anonymous_bytes: Some(100 << 10)
            }
        );
        assert_eq!(
            ResidentMemory::parse("VmHWMX: 1 kB\nRssAnon: many\n"),
            ResidentMemory::default()
        );
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_watch_sees_memory_that_is_gone_again() {
        let watch = AnonymousPeak::watch();
        let before = watch.peak_bytes().expect("linux tells");
        let block = vec![1u8; 64 << 20];
        thread::sleep(Duration::from_millis(200));
        assert!(std::hint::black_box(&block)[block.len() / 2] == 1);
        drop(block);
        assert!(watch.peak_bytes().expect("linux tells") >= before + (60 << 20));
    }
}
