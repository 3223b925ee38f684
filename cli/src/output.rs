//! What the program prints, and how it ends.

use std::error::Error;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::process::ExitCode;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use horizon_core::artifact::Progress;
pub use horizon_runtime::size::bytes;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use serde_json::json;

use crate::args::OutputArgs;

/// The work failed.
pub const EXIT_FAILED: u8 = 1;
/// The command line is wrong.
pub const EXIT_USAGE: u8 = 2;
/// Ctrl-C.
pub const EXIT_INTERRUPTED: u8 = 130;

/// Why the program ends early. Not an [`Error`] itself, so that every error converts into it.
#[derive(Debug)]
pub enum CliError {
    /// The command line asks for something that cannot be; says which flag.
    Usage(String),
    /// The work failed.
    Failed(Box<dyn Error + Send + Sync>),
    /// The work failed in several ways, each worth a line.
    Several {
        /// What.
        summary: String,
        /// Each.
        problems: Vec<String>,
    },
    /// Ctrl-C.
    Interrupted,
    /// Nobody reads stdout any more; not a failure.
    ClosedPipe,
}

impl<E: Error + Send + Sync + 'static> From<E> for CliError {
    fn from(error: E) -> Self {
        Self::Failed(Box::new(error))
    }
}

impl CliError {
    /// A mistake in the command line.
    pub fn usage(message: impl Into<String>) -> Self {
        Self::Usage(message.into())
    }

    /// A failure that has no type of its own.
    pub fn failed(message: impl Into<String>) -> Self {
        Self::Failed(message.into().into())
    }

    /// Prints the error and says how the process ends.
    pub fn report(&self, json: bool) -> ExitCode {
        let (message, causes, code) = match self {
            Self::ClosedPipe => return ExitCode::SUCCESS,
            Self::Interrupted => ("interrupted".to_string(), Vec::new(), EXIT_INTERRUPTED),
            Self::Usage(message) => (message.clone(), Vec::new(), EXIT_USAGE),
            Self::Several { summary, problems } => (summary.clone(), problems.clone(), EXIT_FAILED),
            Self::Failed(error) => (error.to_string(), causes(error.as_ref()), EXIT_FAILED),
        };
        let mut stderr = io::stderr().lock();
        // With stderr closed there is nobody to tell.
        let _ = writeln!(stderr, "error: {message}");
        for cause in &causes {
            let _ = writeln!(stderr, "  {cause}");
        }
        if json {
            let object = json!({ "error": { "message": message, "causes": causes } });
            let _ = writeln!(io::stdout().lock(), "{object}");
        }
        ExitCode::from(code)
    }
}

/// The messages below an error, without those that the message above already contains.
fn causes(error: &(dyn Error + 'static)) -> Vec<String> {
    let mut above = error.to_string();
    let mut list = Vec::new();
    let mut next = error.source();
    while let Some(cause) = next {
        let message = cause.to_string();
        if !above.contains(&message) {
            list.push(message.clone());
            above = message;
        }
        next = cause.source();
    }
    list
}

/// Writes to stdout; a reader that has gone away is [`CliError::ClosedPipe`].
///
/// # Errors
/// What the system says.
pub fn write_stdout(text: &str) -> Result<(), CliError> {
    let mut stdout = io::stdout().lock();
    stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
        .map_err(|e| match e.kind() {
            ErrorKind::BrokenPipe => CliError::ClosedPipe,
            _ => CliError::failed(format!("cannot write to stdout: {e}")),
        })
}

/// Where results, notes and figures go.
#[derive(Clone, Copy, Debug)]
pub struct Output {
    json: bool,
    quiet: bool,
}

impl Output {
    /// As the flags say.
    #[must_use]
    pub fn new(args: OutputArgs) -> Self {
        Self {
            json: args.json,
            quiet: args.quiet,
        }
    }

    /// Whether stdout is for JSON only.
    #[must_use]
    pub fn is_json(self) -> bool {
        self.json
    }

    /// Prints one JSON object on a line of its own.
    ///
    /// # Errors
    /// As [`write_stdout`].
    #[expect(clippy::unused_self, reason = "results go through the output")]
    pub fn object(self, value: &impl Serialize) -> Result<(), CliError> {
        write_stdout(&format!("{}\n", serde_json::to_string(value)?))
    }

    /// Prints JSON, or else the text.
    ///
    /// # Errors
    /// As [`write_stdout`].
    pub fn result(self, value: &impl Serialize, text: impl FnOnce() -> String) -> Result<(), CliError> {
        if self.json {
            self.object(value)
        } else {
            write_stdout(&text())
        }
    }

    /// Prints a line to stderr, unless quiet.
    pub fn note(self, line: &str) {
        if !self.quiet {
            let _ = writeln!(io::stderr().lock(), "{line}");
        }
    }

    /// A progress bar on stderr if that is a terminal; notes are printed in any case, unless quiet.
    #[must_use]
    pub fn progress(self) -> Bar {
        Bar {
            bar: ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden()),
            output: self,
            shown: !self.quiet && io::stderr().is_terminal(),
            phase: Mutex::new(None),
        }
    }
}

/// Progress of long work. It appears once a phase has taken a moment, so that short work does not flicker.
#[derive(Debug)]
pub struct Bar {
    bar: ProgressBar,
    output: Output,
    shown: bool,
    /// Since when there is something that is not drawn yet.
    phase: Mutex<Option<Instant>>,
}

/// How long work goes on unseen.
const PATIENCE: Duration = Duration::from_millis(300);

impl Bar {
    /// Begins a phase whose length is in things that are not bytes.
    pub fn begin_count(&self, what: &str, count: u64) {
        self.start(what, count, "{msg} {wide_bar} {pos}/{len} {eta}");
    }

    /// So many are done.
    pub fn set(&self, done: u64) {
        self.bar.set_position(done);
        self.appear();
    }

    fn start(&self, what: &str, length: u64, template: &str) {
        self.bar.set_length(length);
        self.bar.set_message(what.to_string());
        self.bar.reset();
        if let Ok(style) = ProgressStyle::with_template(template) {
            self.bar.set_style(style);
        }
        if let Ok(mut since) = self.phase.lock() {
            since.get_or_insert_with(Instant::now);
        }
    }

    fn appear(&self) {
        // Whoever finds the lock taken leaves it to the other.
        let Ok(mut since) = self.phase.try_lock() else {
            return;
        };
        if self.shown && self.bar.is_hidden() && since.is_some_and(|s| s.elapsed() > PATIENCE) {
            *since = None;
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
    }

    /// Removes the bar until something begins again.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
        self.bar.set_draw_target(ProgressDrawTarget::hidden());
        if let Ok(mut since) = self.phase.lock() {
            *since = None;
        }
    }
}

impl Progress for Bar {
    fn begin(&self, what: &str, bytes: u64) {
        self.start(
            what,
            bytes,
            "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}",
        );
    }

    fn advance(&self, bytes: u64) {
        self.bar.inc(bytes);
        self.appear();
    }

    fn note(&self, text: &str) {
        self.bar.suspend(|| self.output.note(&format!("note: {text}")));
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.finish();
    }
}

/// `n` with its thousands apart: 6 919 161 856.
#[must_use]
pub fn thousands(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, d) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(' ');
        }
        out.push(d);
    }
    out
}

/// Rows of cells in aligned columns, numbers to the right.
#[must_use]
pub fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |c: usize| {
        rows.iter()
            .filter_map(|r| r.get(c))
            .map(|s| s.chars().count())
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut out = String::new();
    for row in rows {
        let cells = row.iter().zip(&widths).map(|(cell, w)| format!("{cell:>w$}"));
        out.push_str("  ");
        out.push_str(&cells.collect::<Vec<_>>().join("  "));
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use std::fmt;

    use super::*;

    #[derive(Debug)]
    struct Layered(&'static str, Option<Box<Layered>>);

    impl fmt::Display for Layered {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.0)
        }
    }

    impl Error for Layered {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            self.1.as_deref().map(|e| e as _)
        }
    }

    #[test]
    fn a_cause_is_told_once() {
        let inner = Layered("no such file", None);
        let middle = Layered("cannot open a: no such file", Some(Box::new(inner)));
        let outer = Layered("cannot load the model", Some(Box::new(middle)));
        assert_eq!(causes(&outer), ["cannot open a: no such file"]);
    }

    #[test]
    fn numbers_read_well() {
        assert_eq!(
            [thousands(7), thousands(1234), thousands(1_000_000)],
            ["7", "1 234", "1 000 000"]
        );
        assert_eq!(
            table(&[vec!["c".into(), "bytes".into()], vec!["12".into(), "3".into()]]),
            "   c  bytes\n  12      3\n"
        );
    }
}
