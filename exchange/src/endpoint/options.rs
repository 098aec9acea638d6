//! What an endpoint is opened with.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use pleach_transport::auth::Secret;
use pleach_transport::tls::{Tls, TlsError, TlsMode};
use pleach_transport::verbs::VerbsOptions;

use super::error::OpenEndpointError;
use super::gets;
use crate::arena::ArenaLimits;
use crate::calls::CallLimits;
use crate::introduction::Fabrics;
use crate::server::ServerLimits;

/// The default address: any port of this host alone.
pub const DEFAULT_LISTEN: &str = "127.0.0.1:0";

/// How long a send waits for room, and a receive for its tensor, unless they say how long.
pub const DEFAULT_WAIT: Duration = Duration::from_secs(60);

/// The fabric by which an endpoint shares regions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExchangeFabric {
    /// The best one that both programs have.
    #[default]
    Auto,
    /// Shared memory of one host.
    Shm,
    /// TCP sockets.
    Tcp,
    /// RDMA.
    Verbs,
    /// None: tensors go inline.
    None,
}

impl ExchangeFabric {
    const NAMES: [(Self, &'static str); 5] = [
        (Self::Auto, "auto"),
        (Self::Shm, "shm"),
        (Self::Tcp, "tcp"),
        (Self::Verbs, "verbs"),
        (Self::None, "none"),
    ];
}

/// The form of [`ExchangeFabric`].
const FABRIC_FORM: &str = "auto, shm, tcp, verbs or none";

impl FromStr for ExchangeFabric {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = Self::NAMES.into_iter().find(|(_, name)| *name == text);
        known.map(|(fabric, _)| fabric).ok_or_else(|| format!("it takes {FABRIC_FORM}"))
    }
}

impl fmt::Display for ExchangeFabric {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::NAMES.into_iter().find(|(fabric, _)| fabric == self).map(|(_, name)| name);
        formatter.write_str(name.unwrap_or_default())
    }
}

/// The limits of an endpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EndpointLimits {
    /// Of what is sent.
    pub server: ServerLimits,
    /// Of the calls of one link.
    pub calls: CallLimits,
    /// Of lendable memory.
    pub arenas: ArenaLimits,
}

/// What an endpoint is opened with. All has defaults.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct EndpointOptions {
    /// Where peers connect: `HOST:PORT`; port 0 is any free one.
    pub listen: String,
    /// The secret that peers must know. Without one a peer off this host gets tensors inline.
    pub secret: Option<Secret>,
    /// By which fabric memory is shared. From `PLEACH_FABRIC`.
    pub fabric: ExchangeFabric,
    /// Whether a peer with which no regions are shared is an error. From `PLEACH_REQUIRE`.
    pub requires_regions: bool,
    /// Which RDMA device is used, and how. From `PLEACH_VERBS_*`.
    pub verbs: VerbsOptions,
    /// The name of this host: programs share memory where names are equal. From `PLEACH_HOST`.
    pub host: Option<String>,
    /// Where metrics are served. From `PLEACH_METRICS`.
    pub metrics: Option<SocketAddr>,
    /// What may be held, lent and asked.
    pub limits: EndpointLimits,
    /// How long a send waits for room.
    pub send_wait: Duration,
}

impl Default for EndpointOptions {
    fn default() -> Self {
        Self {
            listen: DEFAULT_LISTEN.to_owned(),
            secret: None,
            fabric: ExchangeFabric::Auto,
            requires_regions: false,
            verbs: VerbsOptions::default(),
            host: None,
            metrics: None,
            limits: EndpointLimits::default(),
            send_wait: DEFAULT_WAIT,
        }
    }
}

impl EndpointOptions {
    /// The defaults, with what the environment says: `PLEACH_FABRIC`, `PLEACH_REQUIRE`,
    /// `PLEACH_METRICS`, `PLEACH_SECRET_FILE`, `PLEACH_HOST`, `PLEACH_INTERFACE` and
    /// `PLEACH_VERBS_*`.
    ///
    /// # Errors
    ///
    /// When a variable has a wrong value, or the secret cannot be read.
    pub fn from_env() -> Result<Self, OpenEndpointError> {
        let options = Self::from_variables(|name| std::env::var(name).ok())?;
        Ok(Self { verbs: VerbsOptions::from_env()?, ..options })
    }

    /// As [`EndpointOptions::from_env`], of variables that a function gives, without those of RDMA.
    ///
    /// # Errors
    ///
    /// As of [`EndpointOptions::from_env`].
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Self, OpenEndpointError> {
        let text = |name: &'static str| {
            let value = variable(name).map(|value| value.trim().to_owned());
            value.filter(|value| !value.is_empty())
        };
        let wrong = |variable, value, form| OpenEndpointError::Variable { variable, value, form };
        let mut options = Self { host: text("PLEACH_HOST"), ..Self::default() };
        if let Some(value) = text("PLEACH_FABRIC") {
            options.fabric = value.parse().map_err(|_| wrong("PLEACH_FABRIC", value, FABRIC_FORM))?;
        }
        match text("PLEACH_REQUIRE").as_deref() {
            None => {}
            Some("regions") => options.requires_regions = true,
            Some(value) => return Err(wrong("PLEACH_REQUIRE", value.to_owned(), "'regions'")),
        }
        if let Some(value) = text("PLEACH_METRICS") {
            const FORM: &str = "PORT of loopback, or IP:PORT";
            let address = metrics_address(&value).ok_or_else(|| wrong("PLEACH_METRICS", value, FORM))?;
            options.metrics = Some(address);
        }
        if let Some(path) = text("PLEACH_SECRET_FILE") {
            options.secret = Some(Secret::from_file(Path::new(&path))?);
        }
        if let Some(value) = text("PLEACH_INTERFACE") {
            const FORM: &str = "the name or an address of a network interface";
            let ip = pleach_transport::listening_address(&value);
            let ip = ip.map_err(|_| wrong("PLEACH_INTERFACE", value, FORM))?;
            options.listen = SocketAddr::new(ip, 0).to_string();
        }
        Ok(options)
    }

    /// How links are protected: as the secret says, or else the environment. TLS takes a secret or
    /// certificates: without them nobody would know who is at the other end.
    pub(crate) fn link_tls(&self) -> Result<Tls, OpenEndpointError> {
        let tls = self.secret.as_ref().map_or_else(Tls::from_env, Secret::tls)?;
        if tls.mode() == TlsMode::Require && self.fabric == ExchangeFabric::Verbs {
            return Err(TlsError::Unprotected.into());
        }
        if self.secret.is_some() || tls.has_certificates() {
            return Ok(tls);
        }
        match tls.mode() {
            mode @ (TlsMode::On | TlsMode::Require) => Err(OpenEndpointError::NoKeys { mode }),
            TlsMode::Auto | TlsMode::Off => Ok(Tls::new(TlsMode::Off, None)?),
        }
    }

    /// Whether memory may be shared with programs of this host, or why not.
    pub(crate) fn may_share_memory(&self) -> Result<(), Arc<str>> {
        match self.fabric {
            ExchangeFabric::Auto | ExchangeFabric::Shm => Ok(()),
            fabric => Err(format!("fabric '{fabric}' shares no memory").into()),
        }
    }

    /// The fabrics by which a program that listens at this address has regions. Without a secret
    /// sockets serve programs of this host alone, and NICs nobody.
    pub(crate) fn fabrics(&self, address: IpAddr) -> Fabrics {
        let is_kept = self.secret.is_some() || address.to_canonical().is_loopback();
        let takes = |fabric| self.fabric == fabric || self.fabric == ExchangeFabric::Auto;
        // What RDMA carries between hosts nobody encrypts.
        let is_required = |secret: &Secret| secret.tls().is_ok_and(|tls| tls.mode() == TlsMode::Require);
        let may_have_verbs = self.secret.as_ref().is_some_and(|secret| !is_required(secret));
        let has_verbs = self.fabric == ExchangeFabric::Verbs || gets::has_rdma_devices().unwrap_or(false);
        Fabrics {
            shm: takes(ExchangeFabric::Shm),
            tcp: is_kept && takes(ExchangeFabric::Tcp),
            verbs: may_have_verbs && takes(ExchangeFabric::Verbs) && has_verbs,
        }
    }
}

/// The address of metrics: `PORT` of loopback, or `IP:PORT`.
fn metrics_address(text: &str) -> Option<SocketAddr> {
    let loopback = |port| SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port);
    text.parse().map(loopback).or_else(|_| text.parse()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)]) -> Result<EndpointOptions, OpenEndpointError> {
        let find = |name: &str| variables.iter().find(|(known, _)| *known == name);
        EndpointOptions::from_variables(|name| find(name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn variables_that_are_not_set_or_empty_leave_the_defaults() {
        let options = of(&[("PLEACH_FABRIC", " "), ("PLEACH_HOST", "")]).expect("are good");
        assert_eq!((options.fabric, options.requires_regions), (ExchangeFabric::Auto, false));
        assert_eq!((options.listen.as_str(), options.host, options.metrics), (DEFAULT_LISTEN, None, None));
    }

    #[test]
    fn each_variable_has_its_effect() {
        let options = of(&[
            ("PLEACH_FABRIC", "tcp"),
            ("PLEACH_REQUIRE", "regions"),
            ("PLEACH_METRICS", "9400"),
            ("PLEACH_HOST", "a"),
            ("PLEACH_INTERFACE", "127.0.0.1"),
        ])
        .expect("are good");
        assert_eq!((options.fabric, options.requires_regions), (ExchangeFabric::Tcp, true));
        assert_eq!(options.metrics, "127.0.0.1:9400".parse().ok());
        assert_eq!((options.host.as_deref(), options.listen.as_str()), (Some("a"), "127.0.0.1:0"));
    }

    #[test]
    fn tls_takes_a_secret_and_rdma_takes_none_that_is_required() {
        let secret = |mode| {
            let tls = Tls::new(mode, None).expect("takes no file");
            Some(Secret::new(b"0123456789abcdef").with_tls(tls))
        };
        let verbs = |mode| {
            let fabric = ExchangeFabric::Verbs;
            EndpointOptions { secret: secret(mode), fabric, ..EndpointOptions::default() }
        };
        let address = IpAddr::from([10, 0, 0, 1]);
        assert!(verbs(TlsMode::Off).fabrics(address).verbs);
        assert!(!verbs(TlsMode::Require).fabrics(address).verbs);
        let refused = verbs(TlsMode::Require).link_tls().expect_err("nobody encrypts it").to_string();
        assert!(refused.contains("PLEACH_TLS=require") && refused.contains("RDMA"), "{refused}");
        let text = OpenEndpointError::NoKeys { mode: TlsMode::Require }.to_string();
        assert!(text.contains("PLEACH_TLS=require") && text.contains("PLEACH_SECRET_FILE"), "{text}");
    }

    #[test]
    fn a_wrong_value_is_named_with_what_the_variable_takes() {
        let text = |name, value| of(&[(name, value)]).expect_err("is wrong").to_string();
        assert_eq!(text("PLEACH_FABRIC", "ib"), "PLEACH_FABRIC='ib'; it takes auto, shm, tcp, verbs or none");
        assert_eq!(text("PLEACH_REQUIRE", "x"), "PLEACH_REQUIRE='x'; it takes 'regions'");
        assert!(text("PLEACH_METRICS", "x").contains("PORT of loopback"));
        assert!(text("PLEACH_SECRET_FILE", "/nowhere").contains("/nowhere"));
        assert!(text("PLEACH_INTERFACE", "none0").contains("network interface"));
    }
}
