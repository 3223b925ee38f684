//! Ctrl-C: the first one during work asks it to stop, any other ends the program.

use std::process;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::output::{CliError, EXIT_INTERRUPTED};

static CANCEL: AtomicBool = AtomicBool::new(false);
static BUSY: AtomicBool = AtomicBool::new(false);

/// Work that Ctrl-C stops. Until it is dropped, the first Ctrl-C sets [`Work::cancel`].
#[derive(Debug)]
pub struct Work(());

/// Makes Ctrl-C go through this module.
///
/// # Errors
/// When the system refuses the handler.
pub fn install() -> Result<(), CliError> {
    ctrlc::set_handler(|| {
        let stops_work = BUSY.load(Ordering::SeqCst) && !CANCEL.swap(true, Ordering::SeqCst);
        if !stops_work {
            process::exit(EXIT_INTERRUPTED.into());
        }
    })
    .map_err(CliError::from)
}

impl Work {
    /// Work begins.
    #[must_use]
    pub fn begin() -> Self {
        CANCEL.store(false, Ordering::SeqCst);
        BUSY.store(true, Ordering::SeqCst);
        Self(())
    }

    /// Set when the work should stop.
    #[expect(
        clippy::unused_self,
        reason = "a flag means something only while there is work"
    )]
    #[must_use]
    pub fn cancel(&self) -> &'static AtomicBool {
        &CANCEL
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        BUSY.store(false, Ordering::SeqCst);
    }
}
