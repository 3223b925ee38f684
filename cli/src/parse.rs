//! The command line to [`Cli`], with messages that name the option they are about.

use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, CommandFactory, FromArgMatches};

use crate::args::Cli;

/// Parses the words of the command line, the program's name first.
///
/// # Errors
/// The message that clap prints.
pub fn parse<I>(words: I) -> Result<Cli, clap::Error>
where
    I: IntoIterator,
    I::Item: Into<OsString> + Clone,
{
    let mut command = with_negative_numbers(Cli::command());
    command
        .try_get_matches_from_mut(words)
        .and_then(|matches| Cli::from_arg_matches(&matches))
        .map_err(|e| explain(e, &command))
}

/// `--seed -1` is a bad value of `--seed`, not an unknown option `-1`.
fn with_negative_numbers(command: Command) -> Command {
    command
        .mut_args(|arg| {
            let takes_values = arg.get_action().takes_values();
            arg.allow_negative_numbers(takes_values)
        })
        .mut_subcommands(with_negative_numbers)
}

/// Adds what helps those who forgot to quote a text.
fn explain(mut error: clap::Error, command: &Command) -> clap::Error {
    let word = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(word)) if error.kind() == ErrorKind::UnknownArgument => word.clone(),
        _ => return error,
    };
    if !word.starts_with('-') {
        let hint = format!("put a text of several words in quotes, so that '{word}' is part of it").into();
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![hint]));
    }
    error.with_cmd(command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        with_negative_numbers(Cli::command()).debug_assert();
    }

    #[test]
    fn what_cannot_go_together_is_refused() {
        for line in [
            &["run", "a", "-f", "b"] as &[&str],
            &["run", "a", "--chat", "--raw"],
            &["run", "a", "--greedy", "--temp", "1"],
            &["run", "a", "--block", "48"],
            &["run", "a", "--backend", "tpu"],
            &["run", "a", "--threads", "0"],
            &["run", "a", "--threads", "20000"],
            &["bench", "decode", "--tokens", "1"],
            &["pack", "dir"],
        ] {
            let parsed = parse(std::iter::once(&"horizon").chain(line));
            assert_eq!(parsed.err().map(|e| e.exit_code()), Some(2), "{line:?}");
        }
    }

    /// Every option of every command, given values that few options take.
    #[test]
    fn a_bad_value_names_its_option() {
        let mut refused = 0;
        visit(
            &Cli::command(),
            &mut vec!["horizon".to_owned()],
            &mut |path, arg| {
                let Some(long) = arg.get_long().filter(|_| arg.get_action().takes_values()) else {
                    return;
                };
                for value in [Some("-1"), Some("0"), Some("-0.5"), Some("x y"), Some(""), None] {
                    let mut line = path.to_vec();
                    line.push(format!("--{long}"));
                    line.extend(value.map(str::to_owned));
                    let Err(error) = parse(&line) else { continue };
                    let text = error.to_string();
                    // What the command needs beside it is another matter.
                    if error.kind() != ErrorKind::MissingRequiredArgument {
                        assert!(text.contains(&format!("--{long}")), "{line:?}: {text}");
                        assert!(!text.contains("non-zero type"), "{line:?}: {text}");
                        refused += 1;
                    }
                }
            },
        );
        assert!(refused > 100, "{refused}");
    }

    fn visit(command: &Command, path: &mut Vec<String>, see: &mut impl FnMut(&[String], &clap::Arg)) {
        command.get_arguments().for_each(|arg| see(path, arg));
        for sub in command.get_subcommands() {
            path.push(sub.get_name().to_owned());
            visit(sub, path, see);
            path.pop();
        }
    }

    #[test]
    fn a_prompt_without_quotes_is_recognised() {
        let text = |line: &[&str]| parse(line).err().map(|e| e.to_string()).expect("is refused");
        assert!(text(&["horizon", "run", "Once", "upon", "a", "time"]).contains("quotes"));
        assert!(!text(&["horizon", "run", "Once", "--upon"]).contains("quotes"));
    }
}
