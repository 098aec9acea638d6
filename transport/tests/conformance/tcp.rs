//! The suite over `tcp`, on loopback, in clear and through TLS.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pleach_transport::tcp::TcpDevice;
use pleach_transport::tls::{Tls, TlsMode};
use pleach_transport::{Device, DeviceConfig, HostMemory, LossCause, Memory, Nanos, Rank, Responder, clock};

use crate::world::{Backend, BackendKind, World};

/// Through TLS or in clear.
pub(crate) struct Tcp<const TLS: bool>;

impl<const TLS: bool> Backend for Tcp<TLS> {
    const NAME: &'static str = if TLS { "tcp through TLS" } else { "tcp" };
    const LIVE: bool = true;

    fn start(_world_size: u32) -> Self {
        Self
    }

    fn device(&mut self, mut config: DeviceConfig) -> Box<dyn Device> {
        let mode = if TLS { TlsMode::On } else { TlsMode::Off };
        let tls = Tls::new(mode, None).expect("needs no file");
        config.secret = config.secret.map(|secret| secret.with_tls(tls));
        Box::new(TcpDevice::new(config).expect("listening on loopback"))
    }

    fn memory(&self, len: usize) -> Arc<dyn Memory> {
        HostMemory::new(len)
    }

    fn tick(&mut self) -> Nanos {
        clock::now()
    }
}

/// Blocks at its first message until it is released.
struct Blocks {
    entered: Sender<()>,
    release: Mutex<Receiver<()>>,
}

impl Responder for Blocks {
    fn message(&self, _from: Rank, _message: &[u8]) -> Option<Vec<u8>> {
        let _ = self.entered.send(());
        let _ = self.release.lock().expect("no test panics while it holds this").recv();
        None
    }

    fn lost(&self, _peer: Rank, _cause: &LossCause) {}
}

#[test]
fn a_responder_that_blocks_does_not_keep_its_device_from_being_dropped() {
    let (entered, has_entered) = channel();
    let (release, released) = channel();
    let blocks = Arc::new(Blocks { entered, release: Mutex::new(released) });
    let mut world = World::with(BackendKind::of::<Tcp<false>>(), 2, |config| {
        if config.rank == 0 {
            config.responder = blocks.clone();
        }
    });
    world.connect_all();
    world.post(1, 0, b"hello");
    world.until("the message", |_| has_entered.try_recv().is_ok());
    let device = world.take(0);
    let begun = clock::now();
    drop(device);
    let took = clock::now().since(begun);
    assert!(took < Duration::from_secs(20), "dropping took {took:?}");
    drop(release);
}
