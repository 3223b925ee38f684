//! `horizon completions` and `horizon man`.

use clap::CommandFactory;

use crate::args::Cli;
use crate::output::{CliError, write_stdout};

/// Prints a completion script.
pub fn completions(shell: clap_complete::Shell) -> Result<(), CliError> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "horizon", &mut script);
    write_stdout(&String::from_utf8_lossy(&script))
}

/// Prints the manual page of the program or of one of its commands.
pub fn man(path: &[String]) -> Result<(), CliError> {
    // Building it once gives every command its full name.
    let mut root = Cli::command();
    root.build();
    let mut command = &root;
    for name in path {
        command = command.find_subcommand(name).ok_or_else(|| {
            let known: Vec<&str> = command.get_subcommands().map(clap::Command::get_name).collect();
            CliError::usage(format!(
                "there is no command {name:?} here; there are: {}",
                known.join(", ")
            ))
        })?;
    }
    let mut page = Vec::new();
    clap_mangen::Man::new(command.clone()).render(&mut page)?;
    write_stdout(&String::from_utf8_lossy(&page))
}
