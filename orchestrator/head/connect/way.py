"""Chooses how a host is reached: by fabric (paramiko), or by the ssh program where only that can.

The choice is a pure function of what `ssh -G` says, of known_hosts and of a few facts about this
machine. An option that is not listed here and differs from ssh's default asks for ssh itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from orchestrator.head.connect.known_hosts import KnownLine
from orchestrator.head.connect.ssh_config import Settings

# Options that fabric, or our use of it, obeys.
OBEYED = {
    *("host", "hostname", "user", "port", "identityfile", "identitiesonly", "proxyjump"),
    *("userknownhostsfile", "globalknownhostsfile", "hashknownhosts", "hostkeyalias"),
    *("addressfamily", "bindaddress", "requiredrsasize", "connecttimeout", "connectionattempts"),
}
# Options whose values fabric can do in part: it obeys if one of its own is allowed.
NEGOTIATED = ("ciphers", "macs", "kexalgorithms", "pubkeyacceptedalgorithms")
# Options of terminals, forwarding, passwords and masters: they do not change who is reached, or
# who is let in by a key. The login by Kerberos or by host is tried by ssh where no key is accepted.
WITHOUT_EFFECT = {
    *("addkeystoagent", "batchmode", "canonicaldomains", "canonicalizefallbacklocal"),
    *("canonicalizehostname", "canonicalizemaxdots", "canonicalizepermittedcnames"),
    *("casignaturealgorithms", "clearallforwardings", "compression", "controlmaster"),
    *("controlpath", "controlpersist", "dynamicforward", "enableescapecommandline"),
    *("enablesshkeysign", "escapechar", "exitonforwardfailure", "fingerprinthash"),
    *("forkafterauthentication", "forwardagent", "forwardx11", "forwardx11timeout"),
    *("forwardx11trusted", "gatewayports", "gssapiauthentication", "gssapidelegatecredentials"),
    *("gssapikexalgorithms", "gssapirenewalforcesrekey", "gssapitrustdns", "ignoreunknown"),
    *("hostbasedacceptedalgorithms", "hostbasedauthentication", "ipqos"),
    *("kbdinteractiveauthentication", "localcommand", "localforward", "loglevel", "logverbose"),
    *("numberofpasswordprompts", "obscurekeystroketiming", "passwordauthentication"),
    *("permitlocalcommand", "permitremoteopen", "preferredauthentications", "rekeylimit"),
    *("remotecommand", "remoteforward", "requesttty", "sendenv", "serveralivecountmax"),
    *("serveraliveinterval", "sessiontype", "setenv", "stdinnull", "streamlocalbindmask"),
    *("streamlocalbindunlink", "syslogfacility", "tag", "tcpkeepalive", "tunnel"),
    *("tunneldevice", "updatehostkeys", "visualhostkey", "warnweakcrypto", "xauthlocation"),
}
COVERED = OBEYED | WITHOUT_EFFECT
KINDS_OF_KEY = {
    *("ssh-ed25519", "ssh-rsa"),
    *("ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521"),
}
CHECKED = ("ask", "accept-new", "yes", "true")


class Way(NamedTuple):
    """How a host is reached, and why so."""

    program: str  # fabric, ssh, srun or local
    why: str

    @property
    def by_ssh(self) -> bool:
        return self.program == "ssh"

    def __str__(self) -> str:
        return f"{self.program} ({self.why})"


@dataclass(frozen=True)
class Here:
    """The facts about this machine that count."""

    has_ssh: bool = True
    master: bool = False  # the user's ssh holds a connection to the host
    certificate: str = ""  # a file with a certificate for one of the user's keys
    # Keyword of NEGOTIATED -> what paramiko has; importing it takes 0.2 s.
    algorithms: Callable[[], Settings] = dict


def choose(settings: Settings, defaults: Settings, known: Sequence[KnownLine], here: Here) -> Way:
    """Return the way to a host with these settings and these lines of known_hosts."""
    if not here.has_ssh:
        return Way("fabric", "no ssh program is installed here")
    if here.master:
        return Way("ssh", "your ssh holds a connection to it")
    for keyword in sorted(settings.keys() | defaults.keys()):
        values = settings.get(keyword, ())
        if keyword in COVERED or values == defaults.get(keyword, ()):
            continue
        if keyword == "stricthostkeychecking" and values[:1] in [(word,) for word in CHECKED]:
            continue
        if keyword in NEGOTIATED and common(keyword, settings, here):
            continue
        return Way("ssh", f"{keyword} is set in your ssh_config")
    keys: dict[str, str] = {}  # kind -> key
    for line in known:
        if line.needs_ssh or line.kind not in KINDS_OF_KEY:
            return Way("ssh", f"{line.where} has {line.needs_ssh or line.kind}")
        if keys.setdefault(line.kind, line.key) != line.key:
            return Way("ssh", f"{line.where} is a second {line.kind} key of it")
    if here.certificate:
        return Way("ssh", f"{here.certificate} is a certificate")
    return Way("fabric", "nothing asks for ssh itself")


def common(keyword: str, settings: Settings, here: Here) -> list[str]:
    """Return what paramiko has of the algorithms that a setting allows."""
    allowed = ",".join(settings.get(keyword, ())).split(",")
    return [name for name in here.algorithms().get(keyword, ()) if name in allowed]
