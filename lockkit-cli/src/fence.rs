//! `lockkit fence`.

use lockkit::{FencingToken, LockClient};

use crate::{
    args::{FenceCommand, FenceRaise, FenceShow},
    failure::{Failure, say},
    inspect::{print, take_leave},
};

pub(crate) async fn fence(what: FenceCommand) -> Result<u8, Failure> {
    let (server, above) = match what {
        FenceCommand::Show(FenceShow { server }) => (server, None),
        FenceCommand::Raise(FenceRaise { server, above }) => (server, Some(FencingToken::new(above))),
    };
    let client = server.config()?.connect().await?;
    let done = show(&client, above).await;
    // The answer does not wait for a server that may be away by now.
    let status = done.map_or_else(Failure::report, |()| 0);
    take_leave(&client).await;
    Ok(status)
}

async fn show(client: &LockClient, above: Option<FencingToken>) -> Result<(), Failure> {
    let Some(above) = above else {
        return print(&client.fence().await?.to_string());
    };
    let fence = client.raise_fence(above).await?;
    if fence > above {
        say(&format!(
            "tokens are above {above} by more: they go on above {fence}"
        ));
    }
    print(&fence.to_string())
}
