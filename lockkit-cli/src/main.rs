//! The `lockkit` command. Its promises to users are in `docs/command.md`.

#[cfg(not(unix))]
compile_error!("the lockkit command runs commands under Unix's rules for processes and signals");

mod args;
mod bench;
mod check;
mod child;
mod exec;
mod failure;
mod family;
mod fence;
mod helper_server;
mod inspect;
mod list;
mod run;
mod server;
mod signals;
mod voice;
mod warnings;
mod watch;

use std::{fs::File, io, process::ExitCode, sync::mpsc, thread};

use clap::{CommandFactory, Parser};

use crate::{
    args::{Cli, Command, Man},
    failure::{FAILED, Failure},
};

fn main() -> ExitCode {
    let status = match Cli::try_parse() {
        Ok(cli) => dispatch(cli.command),
        Err(error) => Failure::from_usage(&error),
    };
    let status = status.unwrap_or_else(Failure::report);
    failure::have_said();
    ExitCode::from(status)
}

/// Does what the arguments say, and answers with the exit status.
fn dispatch(command: Command) -> Result<u8, Failure> {
    match command {
        Command::Run(args) => run::run(args),
        Command::Inspect(args) => on_this_thread(inspect::inspect(args)),
        Command::List(args) => on_this_thread(list::list(args)),
        Command::Break(args) => on_this_thread(inspect::break_hold(args)),
        Command::Fence(args) => on_this_thread(fence::fence(args.what)),
        Command::Check(args) => check::check(&args),
        Command::Bench(args) => bench::bench(&args),
        Command::Completions(args) => {
            // Into memory first: writing to a pipe that nobody reads would make it panic.
            let mut script = Vec::new();
            clap_complete::generate(args.shell, &mut Cli::command(), "lockkit", &mut script);
            inspect::put(&String::from_utf8_lossy(&script))?;
            Ok(0)
        }
        Command::Man(args) => man(&args),
        Command::Helper => helper_server::help(),
        Command::Exec(args) => exec::become_command(&args),
    }
}

/// Prints the manual page of the command, or of one of its subcommands.
fn man(args: &Man) -> Result<u8, Failure> {
    let mut command = Cli::command();
    // Gives the subcommands their full names.
    command.build();
    for name in &args.command {
        let found = command.find_subcommand(name).filter(|found| !found.is_hide_set());
        let Some(found) = found.cloned() else {
            return Err(Failure::of_arguments(
                FAILED,
                &format!("there is no subcommand `{name}`"),
            ));
        };
        command = found;
    }
    let mut page = Vec::new();
    clap_mangen::Man::new(command)
        .render(&mut page)
        .map_err(|error| Failure::because("cannot write the manual page", &error))?;
    inspect::put(&String::from_utf8_lossy(&page))?;
    Ok(0)
}

/// The descriptors that the first runtime takes, and panics without.
const FIRST_DESCRIPTORS: usize = 8;

/// The threads that the client's runtime takes, and panics without, with the one that speaks, and one that looks up names.
const FIRST_THREADS: usize = 4;

/// The stack of each thread, whatever `RUST_MIN_STACK` says: with too little of it the process would die.
pub(crate) const STACK: usize = 2 << 20;

/// Fails if there is no room to begin.
fn can_begin() -> Result<(), Failure> {
    let opened: io::Result<Vec<File>> = (0..FIRST_DESCRIPTORS).map(|_| File::open("/dev/null")).collect();
    opened.map_err(|error| Failure::because("cannot start", &error))?;
    // They are all there at the same time, as those of the runtime are.
    let begun: io::Result<Vec<_>> = (0..FIRST_THREADS).map(|_| parked()).collect();
    for (open, thread) in begun.map_err(|error| Failure::because("cannot start", &error))? {
        drop(open);
        let _ = thread.join();
    }
    Ok(())
}

/// A thread that ends when the sender is dropped.
fn parked() -> io::Result<(mpsc::Sender<()>, thread::JoinHandle<()>)> {
    let (open, gate) = mpsc::channel();
    let thread = thread::Builder::new()
        .stack_size(STACK)
        .spawn(move || _ = gate.recv())?;
    Ok((open, thread))
}

/// Runs `task` on the main thread.
fn on_this_thread<T>(task: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    can_begin()?;
    drive(task)
}

/// Runs `task` on the main thread, for who [can begin](can_begin). A command that `run` spawns is tied to the thread that
/// spawned it.
fn drive<T>(task: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .thread_stack_size(STACK)
        .enable_all()
        .build()
        .map_err(|error| Failure::because("cannot start", &error))?;
    let done = runtime.block_on(async {
        signals::outlive_file_limit()
            .map_err(|error| Failure::because("cannot listen to signals", &error))?;
        task.await
    });
    // Dropping it would wait for what cannot be stopped, such as the system's look-up of a host's name.
    runtime.shutdown_background();
    done
}
